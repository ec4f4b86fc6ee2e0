"""fastverify doctor: what is installed, what hardware is here, what is wrong, what to do. Standard library only.

Runs where torch is missing or the compiled libraries do not load: `fastverify doctor`, or `python -m fastverify.doctor`.
"""
