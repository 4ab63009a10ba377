"""Floor 3: layers that are parallel inside and exact at size 1; the model above them knows neither ranks nor FP8."""
