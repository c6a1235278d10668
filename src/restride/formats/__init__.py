"""One package for each format, all of them behind one door: `opening`."""
