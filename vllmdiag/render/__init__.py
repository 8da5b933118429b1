"""Text and JSON of a Diagnosis or a view. Pure: values in, text out."""
