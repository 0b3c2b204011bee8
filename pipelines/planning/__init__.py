"""What a run of a pipeline will take: forecasts of its stages, and plans made of them."""
