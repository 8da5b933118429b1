"""The frozen values that everything else speaks: Snapshot in, Diagnosis out. Pure; imports nothing of ours."""
