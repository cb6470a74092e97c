"""The jobs. Each one is a plain function that plans on the driver, runs tasks on the executors and returns a result."""
