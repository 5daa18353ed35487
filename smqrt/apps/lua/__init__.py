"""Lua applications: the virtual machine, the bridge to Python, applications and pages."""
