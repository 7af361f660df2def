"""What to draw and which steps a window covers: integers only, no files and no torch."""
