"""Programs: public tests decide."""

DATA_SOURCES = ("verl_gdpo/coding",)
