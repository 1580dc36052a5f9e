//! Creates TAP devices, the backends of a guest's network cards, before its QEMU starts, and
//! removes them afterwards.

use crate::bridge_port;
use crate::command_line::Plug;
use crate::process::Account;
use crate::scope::run;
use longhaul_protocol::port::Port;
use std::io;
use std::path::Path;

/// Returns whether this host's kernel can serve network cards.
pub(crate) fn has_vhost() -> bool {
    Path::new("/dev/vhost-net").exists()
}

/// Returns a name for a TAP device that is unique on this machine.
pub(crate) fn name(unique: u32, index: usize) -> String {
    format!("lh{unique:08x}-{index}")
}

/// Creates a TAP device that `account` may open, and makes it a port of a bridge.
pub(crate) async fn create(name: &str, plug: &Plug, account: Option<&Account>) -> io::Result<()> {
    let mut add = vec!["tuntap", "add", "dev", name, "mode", "tap"];
    if plug.queues > 1 {
        add.push("multi_queue");
    }
    let uid = account.map(|account| account.uid.to_string());
    if let Some(uid) = &uid {
        add.extend(["user", uid]);
    }
    run("ip", &add).await?;
    if let Err(error) = wire(name, &plug.bridge, &plug.port).await {
        remove(name).await?;
        return Err(error);
    }
    Ok(())
}

/// Attaches a device to a bridge. It is up only when it is in its VLANs.
async fn wire(name: &str, bridge: &str, port: &Port) -> io::Result<()> {
    if let Some(mtu) = port.mtu {
        run("ip", &["link", "set", "dev", name, "mtu", &mtu.to_string()]).await?;
    }
    run("ip", &["link", "set", "dev", name, "master", bridge]).await?;
    bridge_port::set(name, port).await?;
    run("ip", &["link", "set", "dev", name, "up"]).await?;
    Ok(())
}

/// Removes a TAP device, if it exists.
pub(crate) async fn remove(name: &str) -> io::Result<()> {
    if nix::net::if_::if_nametoindex(name) == Err(nix::errno::Errno::ENODEV) {
        return Ok(());
    }
    run("ip", &["link", "del", "dev", name]).await.map(|_| ())
}
