"""Networking of sandboxes on this machine: an address each, nothing between them, egress by policy.

    fabric = await Fabric.open(FabricSettings(state_directory="/var/lib/paddock/node/net"))
    attachment = await fabric.attach(uid, netns_fd, policy=blueprint.egress)
    write(attachment.resolv_conf)                 # the sandbox's /etc/resolv.conf
    await fabric.set_policy(uid, policy)          # live; flows that are now denied are cut
    await fabric.detach(uid)                      # after the processes are gone
    await fabric.detach(uid, keep_address=True)   # hibernation: `attach` gives the same address
    await fabric.release_all_unknown(known_uids)  # the reaper's call
    await fabric.close()                          # sandboxes keep their network; open() adopts them

Every operation is idempotent by uid and safe to repeat after a crash: links carry the uid as alias
and the slot in their name, policies lie in one small file each, and `open` rebuilds the firewall's
elements from both in one transaction. Links are made by raw rtnetlink (`rtnetlink`, `links`),
firewall elements through libnftables (`nft`, `ruleset`), names are resolved by our own forwarder
(`dns`). What a policy means is decided in `policy`, without effects.

Sockets born inside a sandbox's network namespace come from `netns.socket_in`.

A rootless node has no fabric: without CAP_NET_ADMIN on the machine there are no links and no
firewall, so a rootless sandbox has loopback only. `Fabric.open` then raises `UnsupportedError`.
Launching processes, cgroups and file systems are `paddock.runtime.local`'s business.
"""
