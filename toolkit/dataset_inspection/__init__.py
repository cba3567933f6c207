"""Inspection of the files of a data set before a run, without torch: format, columns, chat template."""
