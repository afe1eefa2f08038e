"""Answers that survive a lost connection: logs of events, in memory and in Redis.

answers.py         begins, joins and finds answers, and reads them
answer.py          one answer: its record and its events
kept_answers.py    which ended answers stay in memory, and for how long
answer_store.py    the logs in Redis
answer_writer.py   writes the events of one answer to the store
"""
