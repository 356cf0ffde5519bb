"""Functions that run in verl's processes, each called in the place of one of verl's.

`verl_gdpo/plugin.py` has the table of them. Importing a module of this folder changes nothing.
"""
