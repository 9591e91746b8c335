"""Configs: what can be set, how TOML becomes settings, and code of a user's own.

settings  the settings of a run, as frozen dataclasses
reading   tables into dataclasses, types checked; errors that name the setting
files     config files, `--set`, and the runs that they describe
own_code  a user's own model, data set or loss
needed    packages that a setting needs
"""

from rootfree_lab.config.settings import Config

__all__ = ["Config"]
