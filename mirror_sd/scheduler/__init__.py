"""Which request goes where and when: pure policy, no sockets, the clock is injected."""
