"""Programs that reach for networks and addresses that sandboxes must not have."""

TRY_TCP = """
import socket, sys
port, *addresses = sys.argv[1:]
for address in addresses:
    try:
        socket.create_connection((address, int(port)), 3)
        print(address)
    except OSError:
        pass
"""
"""Prints the addresses that it could connect to."""

CLOSED = (
    "169.254.169.254 169.254.170.2 100.100.100.200 168.63.129.16 fd00:ec2::254",
    "10.0.0.1 172.16.0.1 172.17.0.1 192.168.0.1 192.168.1.1 100.64.0.1 fd00::1 fe80::1",
    "0.0.0.0 127.0.0.53 ::ffff:169.254.169.254 ::ffff:10.0.0.1 64:ff9b::a9fe:a9fe",
)
"""Services of clouds and private networks, in several notations."""

CONFIGURE = """
import socket, struct
link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
address = struct.pack("=BBBBI", 2, 32, 0, 0, 2) + struct.pack("=HH4s", 8, 2, bytes([10, 9, 9, 9]))
route = struct.pack("=8BI", 2, 0, 0, 0, 254, 3, 0, 1, 0) + struct.pack("=HHI", 8, 4, 1)
device = struct.pack("=BBHiII", 0, 0, 0, 1, 0, 1)  # the loopback down
for kind, body in ((20, address), (24, route), (16, device)):
    head = struct.pack("=IHHII", 16 + len(body), kind, 0x405, 1, 0)
    link.send(head + body)
    print(struct.unpack_from("=i", link.recv(65536), 16)[0])
"""
"""Adds an address and a route, sets a link down, and prints the replies of the kernel."""
