"""The platform around dmuon: a job file in, a trained, tracked and registered model out."""
