"""Tests, at the paths of the modules that they test. A package, so that a rank finds a test module by its name."""
