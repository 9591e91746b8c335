"""Callbacks and registrations for other libraries; each module needs the library of its name."""
