"""Requests to ensembles: a gateway sends the steps of an ensemble to their models and puts the answers together."""
