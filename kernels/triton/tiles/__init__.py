"""Configure tiles by GPU family: the table, its file, and which tiles were seen to have equal bits."""
