"""A plugin of pytest for mutmut: an example that fails is enough, none is made smaller or kept."""

from hypothesis import Phase, settings

settings.register_profile("mutmut", phases=[Phase.explicit, Phase.generate], database=None)
settings.load_profile("mutmut")
