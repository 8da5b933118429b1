"""Every cause by its slug: what it means, the evidence it needs, the next step. Data and its loader."""
