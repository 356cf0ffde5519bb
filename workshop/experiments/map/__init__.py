"""What a simulation of 76 settings says of when GDPO trains better than GRPO."""
