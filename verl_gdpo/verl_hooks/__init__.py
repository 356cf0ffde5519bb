"""All that touches verl. Importing a module here changes verl, so this imports none."""
