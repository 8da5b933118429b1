"""The catalogue of causes: one entry a cause. Data that diagnosis matches against and people read."""
