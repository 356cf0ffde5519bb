"""The modules that touch verl. Importing one of them may change verl, so this file imports none."""
