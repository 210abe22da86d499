"""Data sets for fine-tuning out of credited orchestrations: texts that a deployment opted in to keep, in the formats that trainers take."""
