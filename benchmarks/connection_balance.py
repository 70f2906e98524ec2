"""How evenly kept-alive connections spread over processes that share a port, by three ways to share it.

    python benchmarks/connection_balance.py [--workers 8] [--connections 64] [--rounds 20]

`reuseport`: each process listens by itself, the kernel chooses by a hash of the addresses. `inherited`: all accept from
one listening socket, whoever is awake first. `given`: one process accepts, and gives each connection to whoever has
the fewest (`manege gateway --workers`). A connection that lives as long as its agent stays where it once went, so the
fullest process bounds them all. `burst`: all connect at once; else one per 2 ms.
"""

import argparse
import asyncio
import os
import socket
import statistics
import time

import uvloop


class Named(asyncio.Protocol):
    """Says which process it belongs to."""

    def connection_made(self, transport):
        transport.write(b"%d\n" % os.getpid())


def listener(port, *, shared):
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", port))
    made.listen(2048)
    made.setblocking(False)
    return made


async def accept(way, sock, channel):
    loop = asyncio.get_running_loop()
    if way != "given":
        server = await loop.create_server(Named, sock=sock, backlog=2048)
        await server.serve_forever()
    while True:
        event = asyncio.Event()
        loop.add_reader(channel, event.set)
        await event.wait()
        loop.remove_reader(channel)
        _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        await loop.connect_accepted_socket(Named, socket.socket(fileno=descriptors[0]))


def give(sock, channels):
    """The process that accepts: connections in these rounds do not end, so that taking turns is the fewest."""
    sock.setblocking(True)
    number = 0
    while True:
        connection, _ = sock.accept()
        with connection:
            socket.send_fds(channels[number % len(channels)], [b"c"], [connection.fileno()])
        number += 1


def started(way, workers, port):
    """Pids of all processes."""
    pids = []
    sock = None if way == "reuseport" else listener(port, shared=False)
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(workers)]
    for _, channel in pairs:
        channel.setblocking(False)
        if (pid := os.fork()) == 0:
            own = sock if sock is not None else listener(port, shared=True)
            uvloop.run(accept(way, own, channel))
        pids.append(pid)
    if way == "given":
        if (pid := os.fork()) == 0:
            give(sock, [first for first, _ in pairs])
        pids.append(pid)
    if sock is not None:
        sock.close()
    return pids


async def spread(port, connections, gap_s):
    """How many connections each process has, and how long it took to have them."""

    async def connect():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        return (await reader.readline()), writer

    begun, tasks = time.perf_counter(), []
    for _ in range(connections):
        tasks.append(asyncio.create_task(connect()))
        if gap_s:
            await asyncio.sleep(gap_s)
    opened = await asyncio.gather(*tasks)
    took_s = time.perf_counter() - begun
    for _, writer in opened:
        writer.close()
    counts = {}
    for name, _ in opened:
        counts[name] = counts.get(name, 0) + 1
    return counts, took_s


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    fair = asked.connections / asked.workers
    print(f"{asked.workers} workers, {asked.connections} connections: share of the fullest, times the fair share")
    for way in ("reuseport", "inherited", "given"):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        pids = started(way, asked.workers, port)
        time.sleep(0.5)
        try:
            for name, gap_s in (("burst", 0), ("one by one", 0.002)):
                rounds = [asyncio.run(spread(port, asked.connections, gap_s)) for _ in range(asked.rounds)]
                fullest = [max(counts.values()) / fair for counts, _ in rounds]
                print(
                    f"{way:10} {name:10} median {statistics.median(fullest):.2f}, worst {max(fullest):.2f}; "
                    f"all open after {statistics.median(took for _, took in rounds) * 1e3:.1f} ms"
                )
        finally:
            for pid in pids:
                os.kill(pid, 9)
                os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
