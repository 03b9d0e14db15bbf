"""Planted bugs: each rule of docs/protocol.md taken away, one at a time; random histories must find each."""
