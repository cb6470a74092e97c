"""One job each: a plain function that plans on the driver, runs its tasks on the executors, and gives a result."""
