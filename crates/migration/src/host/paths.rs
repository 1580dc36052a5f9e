//! The network paths that are used at once to a trusted host, from the configuration.

use longhaul_transport::{PATHS_MAX, PathTo};
use serde::Deserialize;
use std::net::{IpAddr, SocketAddr};

/// A network path to a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PathTable {
    /// The host's address.
    to: SocketAddr,
    /// The address of this host from which it is used.
    from: Option<IpAddr>,
}

/// Checks the paths of one table, `[hosts.NAME]`. `listen`: the address of this host's socket.
pub(crate) fn paths_of(
    name: &str,
    tables: &[PathTable],
    listen: SocketAddr,
) -> Result<Vec<PathTo>, String> {
    let wrong = |what: String| format!("`hosts.{name}.paths`: {what}");
    if tables.len() > PATHS_MAX {
        return Err(wrong(format!("it has more than {PATHS_MAX} paths")));
    }
    let mut paths = Vec::new();
    for PathTable { to, from } in tables {
        let path = PathTo {
            to: *to,
            from: *from,
        };
        if to.port() == 0 || to.ip().is_unspecified() {
            return Err(wrong(format!(
                "{to} is no address of a host; write an IP address and a port"
            )));
        }
        if to.is_ipv6() && listen.is_ipv4() {
            return Err(wrong(format!(
                "{to} is an IPv6 address, and `listen` is an IPv4 one; listen on [::], which is \
                 for both"
            )));
        }
        if let Some(from) = from {
            if from.is_ipv4() != to.is_ipv4() {
                return Err(wrong(format!("{from} and {to} are of different families")));
            }
            if from.is_unspecified() || from.is_multicast() {
                return Err(wrong(format!("{from} is no address of this host")));
            }
            if !listen.ip().is_unspecified() && listen.ip() != *from {
                return Err(wrong(format!(
                    "the agent listens on {listen} alone, and cannot send from {from}; let \
                     `listen` be 0.0.0.0 or [::]"
                )));
            }
        }
        if paths.contains(&path) {
            return Err(wrong(format!("{to} is there twice")));
        }
        paths.push(path);
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(entries: &str, listen: &str) -> Result<Vec<PathTo>, String> {
        #[derive(Deserialize)]
        struct Table {
            paths: Vec<PathTable>,
        }
        let table: Table = toml::from_str(&format!("paths = [{entries}]")).unwrap();
        paths_of("paris", &table.paths, listen.parse().unwrap())
    }

    #[test]
    fn paths_have_an_address_of_the_other_host_and_maybe_one_of_this() {
        let two = r#"{ to = "192.0.2.7:7400" }, { to = "192.0.2.7:7400", from = "10.0.0.2" }"#;
        let paths = parse(two, "0.0.0.0:7400").unwrap();
        assert_eq!(paths[0].from, None);
        assert_eq!(paths[1].from, Some([10, 0, 0, 2].into()));
        assert_eq!(parse("", "0.0.0.0:7400").unwrap(), []);
    }

    #[test]
    fn what_cannot_be_a_path_is_refused() {
        let many = r#"{ to = "192.0.2.7:7400" },"#.repeat(PATHS_MAX + 1);
        for (entries, listen, expected) in [
            (many.as_str(), "0.0.0.0:7400", "more than 7"),
            (
                r#"{ to = "0.0.0.0:7400" }"#,
                "0.0.0.0:7400",
                "no address of a host",
            ),
            (
                r#"{ to = "192.0.2.7:0" }"#,
                "0.0.0.0:7400",
                "no address of a host",
            ),
            (
                r#"{ to = "[2001:db8::1]:1" }"#,
                "0.0.0.0:7400",
                "listen on [::]",
            ),
            (
                r#"{ to = "[2001:db8::1]:1", from = "10.0.0.2" }"#,
                "[::]:7400",
                "different families",
            ),
            (
                r#"{ to = "192.0.2.7:1", from = "10.0.0.2" }"#,
                "10.0.0.1:7400",
                "cannot send from 10.0.0.2",
            ),
            (
                r#"{ to = "192.0.2.7:1" }, { to = "192.0.2.7:1" }"#,
                "0.0.0.0:7400",
                "twice",
            ),
        ] {
            let error = parse(entries, listen).unwrap_err();
            assert!(error.contains("hosts.paris.paths"), "{error}");
            assert!(error.contains(expected), "{error}");
        }
    }
}
