"""`rootfree search`: two-stage random search for the settings of every optimizer of a config."""
