"""Controller machinery without domain.

Informers, queues, controllers, expectations, leader election, supervisor, events.
"""
