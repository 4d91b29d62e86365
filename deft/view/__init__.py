"""The live view: a web page about a run in progress or finished, served to this machine only."""
