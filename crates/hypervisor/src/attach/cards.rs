//! Finds what a network card is plugged into, in QEMU's answers about its networks.

use super::names::Names;
use super::options::shown;
use super::words::Words;
use crate::hardware::wiring::{Forward, UserNetwork, Wiring, port};
use crate::observe::Blocker;
use std::collections::BTreeMap;

const ON_A_BRIDGE: &str = "start the guest with a card on a bridge";
/// The bridge that QEMU's helper uses where none is named.
const DEFAULT_BRIDGE: &str = "br0";

/// The beginning of names that QEMU gives.
const NAMELESS: &str = "#net";

/// The beginning of the names of cards among those of backends; no backend's name has a space.
const CARD: &str = "card ";

/// The networks of a QEMU.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Wires {
    /// By name: each card, each backend, each port of a hub.
    ends: BTreeMap<String, End>,
    /// Ports of user networks that lead to the guest, by the backend's name; none where a line is
    /// not understood.
    forwards: BTreeMap<String, Option<Vec<Forward>>>,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct End {
    /// `nic`, `tap`, `user`.
    kind: String,
    /// The settings that QEMU prints.
    info: String,
    queues: u16,
    /// The hub that it is on, and its name there.
    hub: Option<(String, String)>,
}

impl Wires {
    /// Parses the output of `info network` and of `info usernet`.
    pub(super) fn read(networks: &str, usernet: &str) -> Self {
        let mut wires = Self::default();
        let mut hub = None;
        for line in networks.lines() {
            if let Some(name) = line.trim().strip_prefix("hub ") {
                hub = Some(name.to_owned());
                continue;
            }
            let below = line.strip_prefix(" \\ ");
            if below.is_none() {
                hub = None;
            }
            let line = below.unwrap_or(line).trim();
            let Some((name, about)) = line.split_once(": ") else {
                continue;
            };
            let (port, name, about) = match (&hub, about.split_once(": ")) {
                (Some(_), Some((inner, about))) => (Some(name), inner, about),
                _ => (None, name, about),
            };
            let Some((_, about)) = about.split_once("type=") else {
                continue;
            };
            let (kind, info) = about.split_once(',').unwrap_or((about, ""));
            // A card may have the name of its backend.
            let name = match kind {
                "nic" => format!("{CARD}{name}"),
                _ => name.to_owned(),
            };
            let end = wires.ends.entry(name).or_insert_with(|| End {
                kind: kind.to_owned(),
                info: info.to_owned(),
                ..End::default()
            });
            end.queues = end.queues.saturating_add(1);
            end.hub = hub
                .clone()
                .zip(port.map(str::to_owned))
                .or_else(|| end.hub.take());
        }
        wires.read_forwards(usernet);
        wires
    }

    /// ```text
    /// Hub -1 (net0):
    ///   Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ
    ///   TCP[HOST_FORWARD]   9               *  2222       10.0.2.15    22     0     0
    /// ```
    fn read_forwards(&mut self, usernet: &str) {
        let mut name = String::new();
        for line in usernet.lines() {
            if !line.starts_with(' ') {
                let inner = line.trim().strip_suffix("):");
                let inner = inner.and_then(|line| line.split_once('('));
                name = inner.map_or_else(String::new, |(_, name)| name.to_owned());
            }
            if line.contains("HOST_FORWARD") {
                let list = self
                    .forwards
                    .entry(name.clone())
                    .or_insert(Some(Vec::new()));
                match (forward(line), &mut *list) {
                    (Some(forward), Some(list)) => list.push(forward),
                    _ => *list = None,
                }
            }
        }
    }

    /// Returns the backend that a card is plugged into, by the name of its other end, and whether a
    /// hub is between them.
    fn backend(&self, other_end: &str) -> Result<Option<(&str, &End, bool)>, &'static str> {
        if let Some((name, end)) = self.ends.get_key_value(other_end) {
            return Ok(Some((name, end, false)));
        }
        let on_hub = |end: &&End| end.hub.as_ref().is_some_and(|(_, port)| port == other_end);
        let Some(card) = self.ends.values().find(on_hub) else {
            return Ok(None);
        };
        let hub = card.hub.as_ref().map(|(hub, _)| hub);
        let others = self.ends.iter().filter(|(_, end)| {
            end.hub.as_ref().map(|(hub, _)| hub) == hub && !std::ptr::eq(*end, card)
        });
        let others: Vec<_> = others.collect();
        match others.as_slice() {
            [] => Ok(None),
            [(name, end)] if end.kind != "nic" => Ok(Some((name, end, true))),
            _ => Err("it shares a hub of QEMU with others"),
        }
    }

    /// Returns the backends of a kind that QEMU named by itself, in the order of their creation.
    fn nameless(&self, kind: &str) -> Vec<&str> {
        // It is followed by a number and two random digits.
        let number = |name: &str| {
            let digits = name.strip_prefix(NAMELESS)?;
            digits
                .get(..digits.len().checked_sub(2)?)?
                .parse::<u64>()
                .ok()
        };
        let ends = self.ends.iter().filter(|(_, end)| end.kind == kind);
        let mut found: Vec<(u64, &str)> = ends
            .filter_map(|(name, _)| Some((number(name)?, name.as_str())))
            .collect();
        found.sort_unstable();
        found.into_iter().map(|(_, name)| name).collect()
    }

    /// Returns why user networks cannot be made again.
    pub(super) fn refusals(&self, netdevs: &[Words]) -> Vec<Blocker> {
        let networks = self.ends.iter().filter(|(_, end)| end.kind == "user");
        let refusal = |name: &str| {
            let words = self.words(name, "user", netdevs);
            let (why, hint) = user(name, words, self.forwards.get(name)).err()?;
            Some(Blocker {
                text: format!("network {}: {why}", shown(name)),
                hint: hint.to_owned(),
            })
        };
        networks.filter_map(|(name, _)| refusal(name)).collect()
    }

    /// Returns the words that made a backend.
    fn words<'a>(&self, backend: &str, kind: &str, netdevs: &'a [Words]) -> Option<&'a Words> {
        if let Some(words) = netdevs
            .iter()
            .find(|words| words.get("id") == Some(backend))
        {
            return Some(words);
        }
        let place = self
            .nameless(kind)
            .iter()
            .position(|name| *name == backend)?;
        let is_like = |words: &&Words| {
            let made = words.get("type").unwrap_or_default();
            words.get("id").is_none() && (made == kind || (kind == "tap" && made == "bridge"))
        };
        netdevs.iter().filter(is_like).nth(place)
    }
}

fn forward(line: &str) -> Option<Forward> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [protocol, _, from, from_port, to, to_port, ..] = words.as_slice() else {
        return None;
    };
    Some(Forward {
        udp: match *protocol {
            "TCP[HOST_FORWARD]" => false,
            "UDP[HOST_FORWARD]" => true,
            _ => return None,
        },
        from: match *from {
            "*" => None,
            address => Some(address.parse().ok()?),
        },
        from_port: port(from_port)?,
        to: to.parse().ok()?,
        to_port: port(to_port)?,
    })
}

/// Returns the name of a card's network, and what else it is plugged into; `other_end` is the
/// card's property `netdev`.
pub(super) fn wiring(
    card: &str,
    other_end: &str,
    wires: &Wires,
    netdevs: &[Words],
    names: &Names<'_>,
) -> Result<(String, Wiring), Blocker> {
    let refuse = |why: String, hint: &str| Blocker {
        text: format!("card {card}: {why}"),
        hint: hint.to_owned(),
    };
    let backend = wires
        .backend(other_end)
        .map_err(|why| refuse(why.to_owned(), ON_A_BRIDGE))?;
    let Some((name, end, hub)) = backend else {
        return Ok((names.unplugged(card)?, Wiring::default()));
    };
    let words = wires.words(name, &end.kind, netdevs);
    match end.kind.as_str() {
        "tap" => {
            let interface = names.interface(&end.info);
            let interface = interface
                .as_deref()
                .or(words.and_then(|words| words.get("ifname")));
            let helped = end.info.starts_with("helper=");
            let bridge = setting(&end.info, "br").or(words.and_then(|words| words.get("br")));
            let bridge = bridge.or(helped.then_some(DEFAULT_BRIDGE));
            let on = |key: &str| {
                let value = words.and_then(|words| words.get(key));
                matches!(value, Some("on" | "yes" | "true"))
            };
            let given = |key: &str| words.is_some_and(|words| words.get(key).is_some());
            let wiring = Wiring {
                queues: end.queues,
                vhost: on("vhost") || on("vhostforce") || given("vhostfd") || given("vhostfds"),
                hub,
                user: None,
            };
            Ok((names.bridged(card, bridge, interface)?, wiring))
        }
        "user" => {
            let user = user(name, words, wires.forwards.get(name));
            let user = user.map_err(|(why, hint)| refuse(why, hint))?;
            let network = names.user(card, user.restrict)?;
            let wiring = Wiring {
                user: Some(user),
                ..Wiring::default()
            };
            Ok((network, wiring))
        }
        kind @ ("vhost-user" | "vhost-vdpa") => Err(refuse(
            format!("it is served by something of this host outside QEMU ({kind})"),
            ON_A_BRIDGE,
        )),
        kind => Err(refuse(
            format!(
                "it is on a cable of the kind {}, which cannot be plugged in elsewhere",
                shown(kind)
            ),
            ON_A_BRIDGE,
        )),
    }
}

/// Returns a user network by the words that made it, and by the ports that QEMU lists.
fn user(
    name: &str,
    words: Option<&Words>,
    forwards: Option<&Option<Vec<Forward>>>,
) -> Result<UserNetwork, (String, &'static str)> {
    /// Options of the backend itself, and of a card beside it (`-nic`).
    const LOCAL: [&str; 10] = [
        "addr", "hostfwd", "id", "mac", "macaddr", "model", "name", "netdev", "type", "vectors",
    ];
    // Backends that are made while the guest runs have a name; QEMU's own network has no words.
    let own = Words::default();
    let Some(words) = words.or(name.starts_with(NAMELESS).then_some(&own)) else {
        return Err((
            "its user network was made while the guest ran, and QEMU does not report its settings"
                .to_owned(),
            "unplug the card, or restart the guest with it on its command line",
        ));
    };
    let mut user = UserNetwork::default();
    for (key, given) in words.iter() {
        let name = key.split('.').next().unwrap_or(key);
        let is_text = matches!(name, "dnssearch" | "domainname" | "hostname");
        let value = match given {
            value if is_text => value,
            "yes" | "true" | "y" => "on",
            "no" | "false" | "n" => "off",
            value => value,
        };
        let taken = match name {
            name if LOCAL.contains(&name) => Some(()),
            "dnssearch" => user.search(value),
            "ip" => user.take("net", value),
            "ipv6-net" => match value.split_once('/') {
                Some((prefix, bits)) => user
                    .take("ipv6-prefix", prefix)
                    .and_then(|()| user.take("ipv6-prefixlen", bits)),
                None => user.take("ipv6-prefix", value),
            },
            "hostfwd" => Some(()),
            name => user.take(name, value),
        };
        if taken.is_none() {
            let what = match name {
                "smb" | "smbserver" => "shares a folder of this host (smb)",
                "tftp" | "bootfile" => "serves files of this host (tftp)",
                "guestfwd" => "leads to a program or socket of this host (guestfwd)",
                _ => "",
            };
            let text = match what {
                "" => format!(
                    "setting {}={} of its user network cannot be made again",
                    shown(key),
                    shown(given)
                ),
                what => format!("its user network {what}"),
            };
            return Err((
                text,
                "start the guest without it, or with a card on a bridge",
            ));
        }
    }
    let forwards = match forwards {
        None => Vec::new(),
        Some(Some(forwards)) => forwards.clone(),
        Some(None) => {
            return Err((
                "a port of the host that leads to the guest is not understood".to_owned(),
                "use hostfwd with IPv4 addresses, or none",
            ));
        }
    };
    if let Some(forward) = forwards.iter().find(|forward| !forward.is_everywhere()) {
        return Err((
            format!("hostfwd={forward} is at an address that only this host has"),
            "let it listen on every address, or on 127.0.0.1: hostfwd_remove and hostfwd_add in \
             QEMU's monitor",
        ));
    }
    for (number, forward) in forwards.iter().enumerate() {
        let name = format!("hostfwd.{number:02}");
        user.take(&name, &forward.to_string()).ok_or((
            "more than 64 ports of the host lead to the guest".to_owned(),
            "use a card on a bridge",
        ))?;
    }
    Ok(user)
}

/// Returns a setting that QEMU prints.
pub(super) fn setting<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.split(',')
        .find_map(|part| part.trim().strip_prefix(name)?.strip_prefix('='))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NETWORKS: &str = concat!(
        "hub 0\r\n",
        " \\ hub0port1: #net162: index=0,type=user,net=10.0.2.0,restrict=off\r\n",
        " \\ hub0port0: e1000.0: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:56\r\n",
        "hub 1\r\n",
        " \\ hub1port1: e1000.1: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:57\r\n",
        " \\ hub1port0: e1000.2: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:58\r\n",
        " \\ hub1port2: #net312: index=0,type=tap,ifname=t5,script=no,downscript=no\r\n",
        "qq: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:59\r\n",
        " \\ q: index=0,type=tap,fd=4\r\n",
        "qq: index=1,type=nic,\r\n",
        " \\ q: index=1,type=tap,fd=5\r\n",
        "net0: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:62\r\n",
        " \\ net0: index=0,type=tap,ifname=t7,script=no,downscript=no\r\n",
        "lone: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:60\r\n",
        "nic7: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:61\r\n",
        " \\ #net045: index=0,type=user,net=10.0.2.0,restrict=off\r\n",
    );
    const USERNET: &str = concat!(
        "Hub 0 (#net162):\r\n",
        "  Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ\r\n",
        "  TCP[HOST_FORWARD]   9       127.0.0.1  2222       10.0.2.15    22     0     0\r\n",
        "  UDP[HOST_FORWARD]   8               *  5353       10.0.2.20    53     0     0\r\n",
        "  TCP[ESTABLISHED]   10       10.0.2.15  4711       192.0.2.1    80     0     0\r\n",
        "Hub -1 (#net045):\r\n",
        "  Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ\r\n",
        "  TCP6[HOST_FORWARD]  9           [::1]  2222       10.0.2.15    22     0     0\r\n",
    );

    #[test]
    fn backends_are_found_through_hubs() {
        let wires = Wires::read(NETWORKS, USERNET);
        let backend = |end: &str| {
            wires
                .backend(end)
                .map(|it| it.map(|(name, _, hub)| (name, hub)))
        };
        assert_eq!(backend("hub0port0"), Ok(Some(("#net162", true))));
        assert!(backend("hub1port1").is_err());
        assert_eq!(backend("q"), Ok(Some(("q", false))));
        assert_eq!(backend("net0"), Ok(Some(("net0", false))));
        assert_eq!(wires.ends["net0"].kind, "tap");
        assert_eq!(backend("#net045"), Ok(Some(("#net045", false))));
        assert_eq!(backend(""), Ok(None));
        assert_eq!(wires.ends["q"].queues, 2);
        assert_eq!(setting(&wires.ends["q"].info, "fd"), Some("4"));
        assert_eq!(wires.nameless("user"), ["#net045", "#net162"]);
        let forwards = wires.forwards["#net162"].as_ref().unwrap();
        let texts: Vec<String> = forwards.iter().map(ToString::to_string).collect();
        assert_eq!(
            texts,
            ["tcp:127.0.0.1:2222-10.0.2.15:22", "udp::5353-10.0.2.20:53"]
        );
        assert_eq!(wires.forwards["#net045"], None);
    }

    #[test]
    fn words_are_found_by_name_or_in_order() {
        let wires = Wires::read(NETWORKS, "");
        let netdevs: Vec<Words> = [
            "nic,model=e1000",
            "user,hostname=first",
            "bridge,br=br0",
            "user,hostname=second",
            "tap,id=q,fds=4:5",
        ]
        .into_iter()
        .map(|text| Words::read(text, "type"))
        .collect();
        let words = |name: &str, kind: &str| wires.words(name, kind, &netdevs);
        let hostname = |name: &str| words(name, "user").and_then(|words| words.get("hostname"));
        assert_eq!(hostname("#net045"), Some("first"));
        assert_eq!(hostname("#net162"), Some("second"));
        assert_eq!(words("#net312", "tap").unwrap().get("br"), Some("br0"));
        assert_eq!(words("q", "tap").unwrap().get("fds"), Some("4:5"));
        assert!(words("other", "user").is_none());
    }

    #[test]
    fn settings_of_user_networks_are_kept_or_named() {
        let read = |text: &str, forwards: Option<&Option<Vec<Forward>>>| {
            user("n", Some(&Words::read(text, "type")), forwards)
        };
        let kept = read(
            "user,id=n,net=10.0.9.0/24,hostname=a,dnssearch=x,dnssearch=y,hostfwd=tcp::1-:2,\
             restrict=no,ipv6-net=fec0::/64,model=e1000",
            None,
        );
        assert_eq!(
            kept.unwrap().options(),
            "restrict=off,hostname=a,ipv6-prefix=fec0::,ipv6-prefixlen=64,net=10.0.9.0/24,\
             dnssearch=x,dnssearch=y"
        );
        for (text, expected) in [
            ("user,smb=/srv", "its user network shares a folder"),
            ("user,tftp=/srv", "its user network serves files"),
            (
                "user,guestfwd=tcp:10.0.2.9:1-cmd:cat",
                "its user network leads to a program",
            ),
            ("user,x=y", "setting x=y of its user network"),
            ("user,hostname=a b", "setting hostname=a b of its user"),
        ] {
            let (why, _) = read(text, None).unwrap_err();
            assert!(why.starts_with(expected), "{why}");
        }
        let mut wires = Wires::read(NETWORKS, USERNET);
        let (why, _) = read("user", wires.forwards.get("#net045")).unwrap_err();
        assert!(why.contains("not understood"), "{why}");
        let list = wires.forwards.get_mut("#net162").unwrap().as_mut().unwrap();
        list[0].from = Some([192, 0, 2, 1].into());
        let (why, _) = read("user", wires.forwards.get("#net162")).unwrap_err();
        assert!(why.contains("only this host has"), "{why}");
        assert_eq!(
            user("#net045", None, None).unwrap().options(),
            "restrict=off"
        );
        let (why, _) = user("n", None, None).unwrap_err();
        assert!(why.contains("while the guest ran"), "{why}");
    }
}
