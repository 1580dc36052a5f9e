//! Records which table of limits each trusted host has, by its key. A host that is trusted again
//! under another name keeps its limits.

use crate::host::atomic_file;
use crate::host::config::Config;
use crate::host::lock::lock;
use crate::host::peer_limits::{Limits, PeerLimits};
use longhaul_protocol::HostId;
use longhaul_transport::TrustedHost;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The name of the file, in the state folder.
const FILE: &str = "limited-hosts";
/// Limit on the size of the file, in bytes.
const BYTES_MAX: u64 = 1 << 20;

/// The limits of all hosts, and the recorded tables of single hosts.
pub(crate) struct LimitedHosts {
    limits: Limits,
    path: PathBuf,
    tables: Mutex<BTreeMap<HostId, String>>,
}

impl LimitedHosts {
    /// Reads the recorded tables.
    pub(crate) fn open(limits: Limits, state: &Path) -> io::Result<Self> {
        let path = state.join(FILE);
        let tables = read(&path)?;
        Ok(Self {
            limits,
            path,
            tables: Mutex::new(tables),
        })
    }

    /// Returns the limits of a host.
    pub(crate) fn of(&self, host: HostId, name: &str) -> &PeerLimits {
        let own = self.limits.table_of(host, name);
        let table = own.map(str::to_owned);
        let table = table.or_else(|| lock(&self.tables).get(&host).cloned());
        self.limits.of_table(table.as_deref())
    }

    /// Records the tables that the trusted hosts have now.
    pub(crate) fn remember(&self, trusted: &[TrustedHost]) -> io::Result<()> {
        let mut tables = lock(&self.tables);
        let mut now = tables.clone();
        for host in trusted {
            if let Some(table) = self.limits.table_of(host.id, &host.name) {
                now.insert(host.id, table.to_owned());
            }
        }
        if now == *tables {
            return Ok(());
        }
        let lines = now.iter().map(|(host, table)| format!("{host} {table}\n"));
        atomic_file::write(&self.path, lines.collect::<String>().as_bytes())?;
        *tables = now;
        Ok(())
    }

    /// Returns warnings about the tables, given the trusted hosts by key and name.
    fn warnings(&self, trusted: &[(HostId, String)]) -> Vec<String> {
        let tables = lock(&self.tables);
        let mut used = BTreeMap::new();
        for (host, name) in trusted {
            let own = self.limits.table_of(*host, name);
            match (own, tables.get(host)) {
                (Some(own), _) => used.insert(own.to_owned(), None),
                (None, Some(before)) => used.insert(before.clone(), Some(name)),
                (None, None) => continue,
            };
        }
        let of_table = |table: &str| match used.get(table) {
            Some(None) => None,
            Some(Some(name)) => Some(format!(
                "[hosts.{table}] applies to {name}, which was called {table} before: rename the \
                 table"
            )),
            None => Some(format!(
                "[hosts.{table}] limits nobody: no trusted host has this name or fingerprint"
            )),
        };
        self.limits.tables().filter_map(of_table).collect()
    }
}

/// Returns warnings about the tables of limits, given the trusted hosts by fingerprint and name.
pub fn warnings(config: &Config, trusted: &[(String, String)]) -> io::Result<Vec<String>> {
    let hosts = LimitedHosts::open(config.limits.clone(), &config.state)?;
    let known = trusted.iter();
    let known = known.filter_map(|(fingerprint, name)| {
        let host = fingerprint.parse().ok()?;
        Some((host, name.clone()))
    });
    Ok(hosts.warnings(&known.collect::<Vec<_>>()))
}

fn read(path: &Path) -> io::Result<BTreeMap<HostId, String>> {
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    match std::fs::metadata(path) {
        Ok(found) if found.len() > BYTES_MAX => return Err(invalid("it is larger than 1 MiB")),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(error) => return Err(error),
    }
    let text = std::fs::read_to_string(path)?;
    let parsed = text.lines().map(|line| {
        let (host, table) = line.split_once(' ')?;
        Some((host.parse().ok()?, table.to_owned()))
    });
    let parsed: Option<_> = parsed.collect();
    parsed.ok_or_else(|| invalid("a line does not name a fingerprint and a table"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::peer_limits::{HostTable, LimitsTable};
    use longhaul_transport::Scope;

    const PARIS: HostId = HostId([1; 32]);
    const OSLO: HostId = HostId([2; 32]);

    fn limits(names: &[&str]) -> Limits {
        let tables = names.iter().map(|name| {
            let table: HostTable = toml::from_str("limits.guests = 1").unwrap();
            ((*name).to_owned(), table)
        });
        Limits::new(&LimitsTable::default(), &tables.collect()).unwrap()
    }

    fn trusted(name: &str, id: HostId) -> TrustedHost {
        TrustedHost {
            name: name.to_owned(),
            id,
            addresses: Vec::new(),
            scope: Scope {
                may_query: true,
                may_send_guests: true,
            },
        }
    }

    #[test]
    fn a_host_keeps_its_limits_under_another_name() {
        let state = tempfile::tempdir().unwrap();
        let open = |names: &[&str]| LimitedHosts::open(limits(names), state.path()).unwrap();
        let hosts = open(&["paris-2"]);
        let default = hosts.of(OSLO, "oslo-1").guests;
        assert_ne!(default, 1);
        assert_eq!(hosts.of(PARIS, "paris-2").guests, 1);
        hosts.remember(&[trusted("paris-2", PARIS)]).unwrap();
        hosts.remember(&[]).unwrap();
        assert_eq!(hosts.of(PARIS, "friend").guests, 1);
        assert_eq!(hosts.of(OSLO, "friend").guests, default);

        // Also after a restart, until the table is removed.
        let hosts = open(&["paris-2"]);
        assert_eq!(hosts.of(PARIS, "friend").guests, 1);
        let warnings = hosts.warnings(&[(PARIS, "friend".to_owned())]);
        assert_eq!(warnings.len(), 1);
        assert!(warnings[0].contains("rename"), "{warnings:?}");
        assert_eq!(open(&["other"]).of(PARIS, "friend").guests, default);
    }

    #[test]
    fn a_table_may_name_the_fingerprint() {
        let state = tempfile::tempdir().unwrap();
        let fingerprint = PARIS.to_string();
        let hosts = LimitedHosts::open(limits(&[&fingerprint]), state.path()).unwrap();
        assert_eq!(hosts.of(PARIS, "whatever").guests, 1);
        assert_ne!(hosts.of(OSLO, "whatever").guests, 1);
        assert!(hosts.warnings(&[(PARIS, "whatever".to_owned())]).is_empty());
        assert!(hosts.warnings(&[])[0].contains("limits nobody"));
    }

    #[test]
    fn a_table_that_nobody_has_is_named() {
        let state = tempfile::tempdir().unwrap();
        let hosts = LimitedHosts::open(limits(&["paris-2", "paris-3"]), state.path()).unwrap();
        let warnings = hosts.warnings(&[(PARIS, "paris-2".to_owned())]);
        assert_eq!(warnings.len(), 1);
        assert!(warnings[0].starts_with("[hosts.paris-3] limits nobody"));
    }

    #[test]
    fn what_cannot_be_read_is_not_taken_for_nothing() {
        let state = tempfile::tempdir().unwrap();
        for text in ["x", "x paris-2", "\u{0}"] {
            std::fs::write(state.path().join(FILE), text).unwrap();
            assert!(LimitedHosts::open(limits(&[]), state.path()).is_err());
        }
        let file = std::fs::File::create(state.path().join(FILE)).unwrap();
        file.set_len(BYTES_MAX + 1).unwrap();
        assert!(LimitedHosts::open(limits(&[]), state.path()).is_err());
    }
}
