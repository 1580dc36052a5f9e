//! The rules by which the kernel lets guests out through gateways: a table of nftables with what
//! may be forwarded, and the translation of addresses.

use super::gateway::{Subnet, uplinks};
use super::{read_setting, run, set_all};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io;

/// The table. It is one for all gateways of a host, so that it can be replaced at once.
pub const TABLE: &str = "longhaul_gateways";
const FORWARDING: &str = "ipv4/conf/{}/forwarding";

/// A gateway on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NatGateway {
    /// Its device.
    pub device: String,
    /// The bridge of its network.
    pub bridge: String,
    /// Its addresses.
    pub addresses: Vec<Subnet>,
}

/// What the kernel was told for the gateways of this host.
#[derive(Debug, Default)]
pub struct Nat {
    /// Whether what an earlier agent left was taken over.
    found: bool,
    /// Whether there is a table.
    table: bool,
    /// Interfaces that forward because a gateway needs it.
    opened: BTreeSet<String>,
    last: Option<(Vec<NatGateway>, Vec<String>)>,
}

impl Nat {
    /// Lets guests out through these gateways, and no others. Does nothing if that is so already.
    /// Blocks for some milliseconds.
    pub fn apply(&mut self, gateways: &[NatGateway]) -> io::Result<()> {
        if !self.found {
            let left = left()?;
            (self.found, self.table) = (true, left.is_some());
            self.opened = left.unwrap_or_default();
        }
        if gateways.is_empty() {
            return self.remove();
        }
        let uplinks = uplinks()?;
        let wanted = (gateways.to_vec(), uplinks);
        // Others may have removed the table: `nft flush ruleset` removes all.
        if self.last.as_ref() == Some(&wanted) && left()?.as_ref() == Some(&self.opened) {
            return Ok(());
        }
        self.last = None;
        let uplinks = &wanted.1;
        let mut opens = Vec::new();
        for uplink in uplinks {
            if read_setting(&FORWARDING.replace("{}", uplink))? == "0" {
                opens.push(uplink.clone());
            }
        }
        self.opened.extend(opens.iter().cloned());
        let (stay, go): (BTreeSet<String>, BTreeSet<String>) = std::mem::take(&mut self.opened)
            .into_iter()
            .partition(|device| uplinks.contains(device));
        // The rules first: nobody else is to use the host as a router.
        let all = stay.union(&go).cloned().collect();
        (self.opened, self.table) = (all, true);
        nft(&script(gateways, uplinks, &self.opened))?;
        for uplink in &opens {
            set_all(uplink, &[(FORWARDING, "1")])?;
        }
        for device in &go {
            set_all(device, &[(FORWARDING, "0")])?;
        }
        if !go.is_empty() {
            nft(&script(gateways, uplinks, &stay))?;
        }
        self.opened = stay;
        self.last = Some(wanted);
        Ok(())
    }

    /// Removes the rules. Interfaces forward no longer if they did not before.
    fn remove(&mut self) -> io::Result<()> {
        for device in &self.opened {
            set_all(device, &[(FORWARDING, "0")])?;
        }
        if self.table {
            nft(&format!("add table ip {TABLE}\ndelete table ip {TABLE}\n"))?;
        }
        (self.last, self.opened, self.table) = (None, BTreeSet::new(), false);
        Ok(())
    }
}

fn nft(script: &str) -> io::Result<()> {
    run("nft", &["-f", "-"], script).map(drop)
}

/// Returns the interfaces that an earlier agent let forward, from the set in its table; `None` if
/// there is no table.
fn left() -> io::Result<Option<BTreeSet<String>>> {
    let listed = run("nft", &["-j", "list", "set", "ip", TABLE, "opened"], "");
    let listed = match listed {
        Ok(listed) => listed,
        // Nor without nftables.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.to_string().contains("No such file") => return Ok(None),
        Err(error) => return Err(error),
    };
    elements(&listed).map(Some)
}

fn elements(listed: &[u8]) -> io::Result<BTreeSet<String>> {
    let said: serde_json::Value = serde_json::from_slice(listed).map_err(io::Error::other)?;
    let objects = said["nftables"].as_array().into_iter().flatten();
    let elements = objects.filter_map(|object| object["set"]["elem"].as_array());
    let names = elements.flatten().filter_map(|name| name.as_str());
    Ok(names.map(str::to_owned).collect())
}

/// Returns the list of a set: `{ a, b }`.
fn set_of<T: std::fmt::Display>(items: impl IntoIterator<Item = T>) -> String {
    let items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    format!("{{ {} }}", items.join(", "))
}

fn quoted<'a>(names: impl IntoIterator<Item = &'a String>) -> String {
    set_of(names.into_iter().map(|name| format!("\"{name}\"")))
}

/// Returns the commands that make the table what it is to be. They take effect at once or not at
/// all, and keep the chains: connections that are translated go on.
fn script(gateways: &[NatGateway], uplinks: &[String], opened: &BTreeSet<String>) -> String {
    let mut text = format!(
        "add table ip {TABLE}\n\
         add set ip {TABLE} opened {{ type ifname; }}\n\
         add chain ip {TABLE} prerouting {{ type filter hook prerouting priority -300; }}\n\
         add chain ip {TABLE} input {{ type filter hook input priority 0; }}\n\
         add chain ip {TABLE} forward {{ type filter hook forward priority 0; }}\n\
         add chain ip {TABLE} postrouting {{ type nat hook postrouting priority 100; }}\n\
         flush table ip {TABLE}\n\
         flush set ip {TABLE} opened\n"
    );
    if !opened.is_empty() {
        let _ = writeln!(text, "add element ip {TABLE} opened {}", quoted(opened));
    }
    let mut rule = |chain: &str, rule: String| {
        let _ = writeln!(text, "add rule ip {TABLE} {chain} {rule}");
    };
    for gateway in gateways {
        let NatGateway {
            device,
            bridge,
            addresses,
        } = gateway;
        let own = set_of(addresses.iter().map(|subnet| subnet.address));
        let subnets: BTreeSet<Subnet> = addresses.iter().map(|subnet| subnet.network()).collect();
        let subnets = set_of(subnets);
        let device = format!("\"{device}\"");
        // Where the kernel filters bridged frames (br_netfilter), a guest's packet is seen twice:
        // tracked on the bridge, it would not be translated any more.
        rule("prerouting", format!("iifname \"{bridge}\" notrack"));
        // The host itself answers echoes and nothing else.
        rule(
            "input",
            format!("iifname {device} ct state established,related accept"),
        );
        rule(
            "input",
            format!("iifname {device} icmp type echo-request ip daddr {own} accept"),
        );
        rule("input", format!("iifname {device} drop"));
        rule(
            "forward",
            format!("iifname {device} ip saddr != {subnets} drop"),
        );
        // Addresses of the link, where clouds give out credentials.
        rule(
            "forward",
            format!("iifname {device} ip daddr 169.254.0.0/16 drop"),
        );
        if uplinks.is_empty() {
            rule("forward", format!("iifname {device} drop"));
        } else {
            let out = quoted(uplinks);
            rule("forward", format!("iifname {device} oifname != {out} drop"));
            rule("forward", format!("iifname {device} accept"));
            rule(
                "postrouting",
                format!("ip saddr {subnets} oifname {out} masquerade"),
            );
        }
        // Answers, and what the operator's own rules lead in.
        rule(
            "forward",
            format!("oifname {device} ct state established,related accept"),
        );
        rule("forward", format!("oifname {device} ct status dnat accept"));
        rule("forward", format!("oifname {device} drop"));
    }
    // What did not forward before forwards nothing else now.
    rule("forward", "iifname @opened drop".to_owned());
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn gateway() -> NatGateway {
        NatGateway {
            device: "lg0000000000001".to_owned(),
            bridge: "lb0000000000001".to_owned(),
            addresses: vec![Subnet {
                address: Ipv4Addr::new(10, 0, 0, 1),
                prefix_bits: 24,
            }],
        }
    }

    #[test]
    fn guests_get_out_by_the_uplinks_and_nobody_else_gets_in() {
        let opened = BTreeSet::from(["eth0".to_owned()]);
        let text = script(
            &[gateway()],
            &["eth0".to_owned(), "wan".to_owned()],
            &opened,
        );
        let rules: Vec<String> = text
            .lines()
            .filter_map(|line| line.strip_prefix("add rule ip longhaul_gateways "))
            .map(|rule| {
                rule.replace("b0000000000001", "b1")
                    .replace("g0000000000001", "g1")
            })
            .collect();
        assert_eq!(
            rules,
            [
                r#"prerouting iifname "lb1" notrack"#,
                r#"input iifname "lg1" ct state established,related accept"#,
                r#"input iifname "lg1" icmp type echo-request ip daddr { 10.0.0.1 } accept"#,
                r#"input iifname "lg1" drop"#,
                r#"forward iifname "lg1" ip saddr != { 10.0.0.0/24 } drop"#,
                r#"forward iifname "lg1" ip daddr 169.254.0.0/16 drop"#,
                r#"forward iifname "lg1" oifname != { "eth0", "wan" } drop"#,
                r#"forward iifname "lg1" accept"#,
                r#"postrouting ip saddr { 10.0.0.0/24 } oifname { "eth0", "wan" } masquerade"#,
                r#"forward oifname "lg1" ct state established,related accept"#,
                r#"forward oifname "lg1" ct status dnat accept"#,
                r#"forward oifname "lg1" drop"#,
                "forward iifname @opened drop",
            ]
        );
        assert!(text.contains(r#"add element ip longhaul_gateways opened { "eth0" }"#));
        let text = script(&[gateway()], &[], &BTreeSet::new());
        assert!(!text.contains("masquerade") && !text.contains("add element"));
        assert!(text.contains("forward iifname \"lg0000000000001\" drop\n"));
    }

    #[test]
    fn what_an_earlier_agent_opened_is_read_from_its_table() {
        let listed = br#"{"nftables": [{"metainfo": {"version": "1.0.6"}},
            {"set": {"family": "ip", "name": "opened", "elem": ["eth0", "wan"]}}]}"#;
        let names: Vec<String> = elements(listed).unwrap().into_iter().collect();
        assert_eq!(names, ["eth0", "wan"]);
        let empty = br#"{"nftables": [{"set": {"family": "ip", "name": "opened"}}]}"#;
        assert!(elements(empty).unwrap().is_empty());
        assert!(elements(b"").is_err());
    }
}
