"""`python -m data_prep TASK ...` in a checkout: the same as `verl-gdpo data TASK ...`.

The code is in `verl_gdpo/data_prep/`, so that the installed package has it too.
"""
