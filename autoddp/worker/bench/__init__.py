"""The program that `autoddp bench` runs on every rank: python -m autoddp.worker.bench RESULT.json SETTINGS."""
