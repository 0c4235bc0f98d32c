"""Controller machinery without domain.

Informers, queues, controllers, leader election, supervisor, events.
"""
