"""Many runs: the entries and seeds of a config, side by side or one by one, and a demonstration."""
