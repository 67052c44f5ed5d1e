"""Progress of long work, as bars on a terminal and as lines in a log."""
