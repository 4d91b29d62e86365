"""What every run has, whatever it trains: directory, checkpoints, log, seeds, stop signals, devices and processes."""
