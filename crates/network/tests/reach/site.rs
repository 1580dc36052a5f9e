//! Builds sites from network namespaces: an "Internet" with a server, and hosts behind routers.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// What a router does to its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Nat {
    None,
    FullCone,
    Restricted,
    PortRestricted,
    Symmetric,
}

/// The address of the server.
pub(crate) const SERVER: [u8; 4] = [198, 51, 100, 1];

/// Two hosts and a server. Its namespaces are removed at the end.
pub(crate) struct Site {
    name: String,
}

impl Site {
    /// Returns `None` without the permission to create namespaces.
    pub(crate) fn new(nats: [Nat; 2]) -> Option<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("lhr{}-{number}", std::process::id());
        if !nix::unistd::geteuid().is_root() {
            // Others test this where they may.
            return None;
        }
        let site = Self { name };
        for part in ["net", "r0", "r1", "h0", "h1"] {
            run("ip", &["netns", "add", &site.namespace(part)], "");
            site.ip(part, "link set lo up\n");
        }
        site.ip(
            "net",
            "link add br0 type bridge\naddr add 198.51.100.1/24 dev br0\nlink set br0 up\n",
        );
        for (index, nat) in nats.into_iter().enumerate() {
            site.host(index, nat);
        }
        Some(site)
    }

    /// Returns the namespace of `net`, `r0`, `r1`, `h0` or `h1`.
    pub(crate) fn namespace(&self, part: &str) -> String {
        format!("{}-{part}", self.name)
    }

    pub(crate) fn file(&self, part: &str) -> File {
        File::open(PathBuf::from("/run/netns").join(self.namespace(part))).unwrap()
    }

    fn host(&self, index: usize, nat: Nat) {
        let (router, host) = (format!("r{index}"), format!("h{index}"));
        let of = |part: &str| self.namespace(part);
        self.ip(
            "net",
            &format!(
                "link add to{index} type veth peer name wan netns {0}\n\
                 link set to{index} master br0 up\n",
                of(&router)
            ),
        );
        self.ip(
            &router,
            &format!(
                "link add lan type veth peer name eth0 netns {0}\n\
                 link set lan up\nlink set wan up\n\
                 addr add 198.51.100.{1}/24 dev wan\n",
                of(&host),
                11 + index
            ),
        );
        self.set(&router, "net/ipv4/ip_forward", "1");
        let other = 1 - index;
        let route = format!(
            "route add 203.0.113.{}/30 via 198.51.100.{}\n",
            16 * other,
            11 + other
        );
        self.ip(&router, &route);
        match nat {
            // The host has a public address behind its router.
            Nat::None => {
                self.ip(
                    &router,
                    &format!("addr add 203.0.113.{}/30 dev lan\n", 16 * index + 1),
                );
                self.ip(
                    &host,
                    &format!(
                        "link set eth0 up\naddr add 203.0.113.{0}/30 dev eth0\n\
                         route add default via 203.0.113.{1}\n",
                        16 * index + 2,
                        16 * index + 1
                    ),
                );
                self.ip(
                    "net",
                    &format!(
                        "route add 203.0.113.{}/30 via 198.51.100.{}\n",
                        16 * index,
                        11 + index
                    ),
                );
            }
            nat => {
                self.ip(
                    &router,
                    &format!("addr add 192.168.{}.1/24 dev lan\n", index + 1),
                );
                self.ip(
                    &host,
                    &format!(
                        "link set eth0 up\naddr add 192.168.{0}.2/24 dev eth0\n\
                         route add default via 192.168.{0}.1\n",
                        index + 1
                    ),
                );
                self.nft(&router, &rules(nat));
            }
        }
    }

    /// Lets no datagram pass between the two routers.
    pub(crate) fn cut(&self) {
        for index in 0..2 {
            let other = 1 - index;
            let public = format!("198.51.100.{}", 11 + other);
            let network = format!("203.0.113.{}/30", 16 * other);
            self.nft(
                &format!("r{index}"),
                &format!(
                    "table ip cut {{\n chain forward {{\n  type filter hook forward priority -10;\n\
                     \x20 ip daddr {{ {public}, {network} }} drop\n }}\n}}\n"
                ),
            );
        }
    }

    pub(crate) fn restore(&self) {
        for router in ["r0", "r1"] {
            self.nft(router, "delete table ip cut\n");
        }
    }

    fn ip(&self, part: &str, batch: &str) {
        run("ip", &["-n", &self.namespace(part), "-batch", "-"], batch);
    }

    fn nft(&self, part: &str, rules: &str) {
        let namespace = self.namespace(part);
        run(
            "ip",
            &["netns", "exec", &namespace, "nft", "-f", "-"],
            rules,
        );
    }

    /// Sets a kernel setting of a part, by its path below /proc/sys.
    fn set(&self, part: &str, setting: &str, value: &str) {
        let namespace = self.namespace(part);
        let file = format!("/proc/sys/{setting}");
        let command = ["netns", "exec", &namespace, "tee", &file];
        run("ip", &command, value);
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for part in ["net", "r0", "r1", "h0", "h1"] {
            let namespace = self.namespace(part);
            // What was not created cannot be removed.
            let _ = Command::new("ip")
                .args(["netns", "del", &namespace])
                .status();
        }
    }
}

/// Returns the rules of a NAT. Datagrams that belong to nothing are dropped on input: otherwise
/// they would occupy the port that the host's mapping needs.
fn rules(nat: Nat) -> String {
    let base = "table ip firewall {
  chain input {
    type filter hook input priority filter; policy drop;
    iifname { lo, lan } accept
    ct state established,related accept
    icmp type echo-request accept
  }
}
";
    let random = match nat {
        Nat::Symmetric => " to :1024-65535 fully-random",
        _ => "",
    };
    let known = match nat {
        Nat::FullCone => Some(("inet_service", "udp sport", "udp dport")),
        Nat::Restricted => Some((
            "ipv4_addr . inet_service",
            "ip daddr . udp sport",
            "ip saddr . udp dport",
        )),
        _ => None,
    };
    let known = known.map_or(String::new(), |(key, sent, received)| {
        format!(
            "  map senders {{
    type {key} : ipv4_addr . inet_service
    flags dynamic,timeout
    timeout 120s
  }}
  chain sent {{
    type filter hook postrouting priority 101; policy accept;
    oifname wan ct direction original update @senders \
     {{ {sent} : ct original ip saddr . ct original proto-src }}
    oifname wan ct direction reply update @senders \
     {{ {sent} : ct reply ip saddr . ct reply proto-src }}
  }}
  chain received {{
    type nat hook prerouting priority dstnat; policy accept;
    iifname wan dnat ip to {received} map @senders
  }}
"
        )
    });
    format!(
        "{base}table ip nat {{
{known}  chain translated {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname wan meta l4proto udp masquerade{random}
    oifname wan masquerade
  }}
}}
"
    )
}

fn run(program: &str, arguments: &[&str], input: &str) {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(input.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}\n{input}",
        String::from_utf8_lossy(&output.stderr)
    );
}
