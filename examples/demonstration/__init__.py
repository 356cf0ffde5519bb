"""GRPO and GDPO side by side, in verl's trainer without a GPU: `./run_demo.sh`."""
