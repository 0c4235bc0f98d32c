"""Networking of sandboxes on this machine: one address each, mutual isolation, egress policies.

    fabric = await Fabric.open(FabricSettings(state_directory="/var/lib/paddock/node/net"))
    attachment = await fabric.attach(uid, netns_fd, policy=blueprint.egress)
    write(attachment.resolv_conf)                 # the sandbox's /etc/resolv.conf
    await fabric.set_policy(uid, policy)          # live; flows that are now denied are reset
    await fabric.detach(uid)                      # after the processes are gone
    await fabric.detach(uid, keep_address=True)   # hibernation: `attach` reuses the address
    await fabric.release_all_unknown(known_uids)  # for the janitor
    await fabric.close()                          # sandboxes keep their network; open() adopts them

Every operation is idempotent by uid and safe to repeat after a crash: a link has the uid as its
alias and the slot in its name, each policy is one small file, and `open` rebuilds the elements of
the firewall from both in one transaction. Links are created by raw rtnetlink (`rtnetlink`,
`links`), firewall elements through libnftables (`nft`, `ruleset`), names are resolved by a
forwarder (`dns`). `policy` compiles egress policies without side effects.

`netns.socket_in` creates sockets inside a sandbox's network namespace.

A rootless node has no fabric: links and firewall need CAP_NET_ADMIN on the machine, so a rootless
sandbox has loopback only. `Fabric.open` then raises `UnsupportedError`.
"""
