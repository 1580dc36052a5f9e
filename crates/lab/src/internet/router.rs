//! Controls a router: a network namespace with a NAT, which can be rebooted and rebound.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, socket,
};

use super::access::Nat;
use super::rules::{DOWN, Rules};
use crate::error::{During, LabError};
use crate::netns::Namespace;
use crate::process::run_with_input;

/// The table in which the mappings of ports are.
const MAPPED: &str = "table inet mapped {
  chain forwarded {}
  chain received {}
  chain sent {}
  chain forward {
    type filter hook forward priority filter; policy accept;
    jump forwarded
  }
  chain prerouting {
    type nat hook prerouting priority dstnat; policy accept;
    jump received
  }
  chain postrouting {
    type nat hook postrouting priority srcnat; policy accept;
    jump sent
  }
}
";

/// A daemon that maps ports of a router. It ends when this is dropped.
#[derive(Debug)]
pub struct PortMapper {
    process: Child,
}

impl Drop for PortMapper {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A router between a site's hosts and the Internet, or a carrier's behind it.
#[derive(Debug)]
pub struct Router {
    namespace: Namespace,
    nat: Nat,
    outside: String,
    inside: String,
    measured_from: String,
    rebound: AtomicU32,
}

impl Router {
    /// Makes a namespace a router between two of its interfaces, which need not exist yet.
    pub(super) fn start(
        namespace: Namespace,
        nat: Nat,
        [outside, inside]: [&str; 2],
        measured_from: &str,
    ) -> Result<Self, LabError> {
        forward(&namespace)?;
        let router = Self {
            namespace,
            nat,
            outside: outside.to_owned(),
            inside: inside.to_owned(),
            measured_from: measured_from.to_owned(),
            rebound: AtomicU32::new(0),
        };
        router.load(&router.rules())?;
        Ok(router)
    }

    /// Returns its network namespace.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Returns what it does to IPv4.
    pub fn nat(&self) -> Nat {
        self.nat
    }

    /// Reboots it: it forgets all mappings and connections, and keeps its addresses. A NAT that
    /// keeps hosts' ports gives the same mappings again once the hosts send.
    ///
    /// # Errors
    /// When the kernel or `nft` refuses.
    pub fn reboot(&self) -> Result<(), LabError> {
        self.load(DOWN)?;
        self.forget_connections()?;
        self.load(&self.rules())
    }

    /// Reboots it, and maps hosts' UDP ports to other ports from then on.
    ///
    /// # Errors
    /// When the kernel or `nft` refuses.
    pub fn rebind(&self) -> Result<(), LabError> {
        self.rebound.fetch_add(1, Ordering::Relaxed);
        self.reboot()
    }

    /// Starts a daemon that maps ports of this public address for hosts which ask by PCP or
    /// NAT-PMP, or, with `upnp`, by UPnP alone. Its files are in a folder.
    ///
    /// # Errors
    /// When it is not installed, or does not start.
    pub fn map_ports(
        &self,
        folder: &Path,
        address: &str,
        upnp: bool,
    ) -> Result<PortMapper, LabError> {
        let Self {
            outside, inside, ..
        } = self;
        self.namespace
            .configure(&format!("addr add {address}/32 dev {outside}\n"))?;
        self.load(MAPPED)?;
        let yes = |is: bool| if is { "yes" } else { "no" };
        let text = format!(
            "ext_ifname={outside}\next_ip={address}\nlistening_ip={inside}\n\
             enable_upnp={}\nenable_natpmp={}\nsecure_mode=yes\n\
             upnp_table_name=mapped\nupnp_nat_table_name=mapped\n\
             upnp_forward_chain=forwarded\nupnp_nat_chain=received\n\
             upnp_nat_postrouting_chain=sent\n\
             uuid=6f6e6c79-2d69-6e2d-7468-65206c616220\n\
             allow 1024-65535 0.0.0.0/0 1024-65535\n",
            yes(upnp),
            yes(!upnp)
        );
        let file = folder.join("port-mapper.conf");
        fs::write(&file, text).during(|| format!("write {}", file.display()))?;
        let log = folder.join("port-mapper.log");
        let output = File::create(&log).during(|| format!("make {}", log.display()))?;
        let errors = output.try_clone().during(|| "use a log twice".to_owned())?;
        let mut command = Command::new("miniupnpd");
        command
            .args(["-d", "-f"])
            .arg(&file)
            .arg("-P")
            .arg(folder.join("port-mapper.pid"))
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors);
        let started = self.namespace.enter(|| command.spawn())?;
        let process = started.map_err(|error| LabError::Missing {
            what: format!("miniupnpd, which maps ports ({error})"),
            hint: "sudo scripts/install lab".to_owned(),
        })?;
        Ok(PortMapper { process })
    }

    fn rules(&self) -> String {
        let rules = Rules {
            nat: self.nat,
            outside: &self.outside,
            inside: &self.inside,
            measured_from: &self.measured_from,
            rebound: self.rebound.load(Ordering::Relaxed),
        };
        rules.text()
    }

    fn load(&self, rules: &str) -> Result<(), LabError> {
        self.namespace.enter(|| {
            let mut command = Command::new("nft");
            run_with_input(command.args(["-f", "-"]), rules)
        })??;
        Ok(())
    }

    /// Rulesets come and go without the kernel's table of connections, which has the mappings.
    fn forget_connections(&self) -> Result<(), LabError> {
        self.namespace.enter(flush_connections)?.during(|| {
            format!(
                "forget the connections of {} (hint: modprobe nf_conntrack_netlink)",
                self.namespace.name()
            )
        })
    }
}

/// Lets a namespace forward packets.
pub(super) fn forward(namespace: &Namespace) -> Result<(), LabError> {
    namespace.set("net/ipv4/ip_forward", "1")?;
    if Path::new("/proc/sys/net/ipv6").exists() {
        namespace.set("net/ipv6/conf/all/forwarding", "1")?;
    }
    Ok(())
}

/// Empties the table of connections of the calling thread's network namespace, by a message of
/// nfnetlink: "delete a connection" without naming one.
fn flush_connections() -> nix::Result<()> {
    const LENGTH: u32 = 20;
    const CONNECTIONS: u16 = 1; // NFNL_SUBSYS_CTNETLINK
    const DELETE: u16 = 2; // IPCTNL_MSG_CT_DELETE
    const REQUEST_AND_ACKNOWLEDGE: u16 = 1 | 4;
    const ERROR_AT: usize = 16; // after the header of the answer
    let mut message = Vec::with_capacity(LENGTH as usize);
    message.extend(LENGTH.to_ne_bytes());
    message.extend(((CONNECTIONS << 8) | DELETE).to_ne_bytes());
    message.extend(REQUEST_AND_ACKNOWLEDGE.to_ne_bytes());
    message.extend([0; 8]); // sequence number, sender
    message.extend([0; 4]); // any family, version 0, no resource
    let socket = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkNetFilter,
    )?;
    let kernel = NetlinkAddr::new(0, 0);
    sendto(socket.as_raw_fd(), &message, &kernel, MsgFlags::empty())?;
    let mut answer = [0; 256];
    let length = recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty())?;
    let error = answer[..length]
        .get(ERROR_AT..ERROR_AT + 4)
        .and_then(|bytes| bytes.try_into().ok())
        .map_or(Errno::EPROTO as i32, |bytes| -i32::from_ne_bytes(bytes));
    match error {
        0 => Ok(()),
        error => Err(Errno::from_raw(error)),
    }
}
