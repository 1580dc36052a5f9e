//! Implements the trust store: the hosts that this one knows, by name, and what each may do here.
//!
//! There are two lists: the hosts that an operator trusts by hand, in a file, and the members of a
//! realm, which come from outside and replace each other as a whole.

use crate::files::write_atomic;
use longhaul_protocol::HostId;
use longhaul_protocol::limits::NAME_BYTES_MAX;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// The usual name of the file in the state folder.
pub const TRUST_FILE: &str = "trust.toml";
/// The maximum number of hosts in one store.
pub const TRUSTED_HOSTS_MAX: usize = 10_000;
/// The maximum number of addresses of one host.
pub const ADDRESSES_MAX: usize = 16;
const FILE_BYTES_MAX: u64 = 16 << 20;
const HEADER: &str = "\
# Hosts that this host trusts. Written by `longhaul host trust`; it may be edited by hand and is
# read again when it changed. Comments are lost when Longhaul writes it.
\n";

/// The permissions of a trusted host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Scope {
    /// It may query: plans, this host's resources, the speed of the link.
    pub may_query: bool,
    /// It may send guests here.
    pub may_send_guests: bool,
}

/// One permission of a scope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Permission {
    /// [`Scope::may_query`].
    Query,
    /// [`Scope::may_send_guests`].
    SendGuests,
}

impl Scope {
    /// Returns the permissions that either of both has.
    pub fn or(self, other: Self) -> Self {
        Self {
            may_query: self.may_query || other.may_query,
            may_send_guests: self.may_send_guests || other.may_send_guests,
        }
    }

    /// Returns whether the scope includes a permission.
    pub fn allows(&self, permission: Permission) -> bool {
        match permission {
            Permission::Query => self.may_query,
            Permission::SendGuests => self.may_send_guests,
        }
    }
}

impl fmt::Display for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Query => "query",
            Self::SendGuests => "send guests here",
        })
    }
}

/// A host that this one knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustedHost {
    /// Its name here.
    pub name: String,
    /// The only identity accepted under this name.
    pub id: HostId,
    /// Its addresses: `host:port` each, the preferred one first.
    pub addresses: Vec<String>,
    /// Its permissions here.
    pub scope: Scope,
}

/// A member of a realm whose name a host has that is trusted by hand. The host keeps the name; the
/// member is known by its identity only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NameCollision {
    /// The name.
    pub name: String,
    /// The host that is trusted by hand.
    pub trusted: HostId,
    /// The member.
    pub member: HostId,
}

impl fmt::Display for NameCollision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            trusted,
            member,
        } = self;
        write!(
            f,
            "`{name}` is the host {trusted}, trusted by hand, and a member of the realm with \
             another identity, {member}: here the name stays with the first; give one of both \
             another name, or run `longhaul host forget {name}`"
        )
    }
}

/// Why the trust store could not be read or changed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum TrustError {
    /// The file cannot be read or written.
    #[error("{}: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: Arc<io::Error>,
    },
    /// The file is malformed; no host is trusted until it is repaired.
    #[error("{}: {error}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The error and its place.
        error: String,
    },
    /// The name belongs to another identity.
    #[error(
        "host `{name}` is trusted with another identity: it was {was}, this is {now}; compare, \
         and if the change is right run `longhaul host trust {name} ... --replace`"
    )]
    IdentityChanged {
        /// The name.
        name: String,
        /// The identity in the store.
        was: HostId,
        /// The given identity.
        now: HostId,
    },
    /// The identity is trusted under another name.
    #[error("identity {id} is trusted already, under the name `{name}`")]
    OtherName {
        /// The name in the store.
        name: String,
        /// The identity.
        id: HostId,
    },
    /// There is no such host.
    #[error("no host `{0}` is trusted here")]
    NoSuchHost(String),
    /// The entry itself is invalid.
    #[error("{0}")]
    BadEntry(String),
}

/// The trust store: a TOML file, with its last read content cached. Cheap to clone.
#[derive(Debug, Clone)]
pub struct TrustStore(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    cached: Mutex<Option<(Stamp, Arc<Hosts>)>>,
    members: RwLock<Arc<Vec<TrustedHost>>>,
}

/// Distinguishes states of the file.
type Stamp = Option<(u64, u64, i64, i64)>;
type Hosts = BTreeMap<String, TrustedHost>;

#[derive(Serialize, Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct FileContent {
    #[serde(default)]
    host: BTreeMap<String, FileEntry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileEntry {
    fingerprint: String,
    #[serde(default)]
    addresses: Vec<String>,
    #[serde(default)]
    may_query: bool,
    #[serde(default)]
    may_send_guests: bool,
}

impl TrustStore {
    /// Opens the store at `path`; with a missing file no host is trusted.
    pub fn open(path: &Path) -> Result<Self, TrustError> {
        let store = Self::at(path.to_owned());
        store.hosts()?;
        Ok(store)
    }

    /// A store of nobody, for programs that trust no host.
    pub(crate) fn none() -> Self {
        Self::at(PathBuf::new())
    }

    fn at(path: PathBuf) -> Self {
        Self(Arc::new(Inner {
            path,
            cached: Mutex::new(None),
            members: RwLock::default(),
        }))
    }

    /// Replaces the members of the realm. Returns those whose names belong to other hosts, which
    /// are trusted by hand.
    pub fn set_members(&self, members: Vec<TrustedHost>) -> Result<Vec<NameCollision>, TrustError> {
        let shared = Arc::new(members);
        *self
            .0
            .members
            .write()
            .unwrap_or_else(PoisonError::into_inner) = shared.clone();
        let hosts = self.hosts()?;
        let collision = |member: &TrustedHost| {
            let trusted = hosts
                .get(&member.name)
                .filter(|host| host.id != member.id)?;
            Some(NameCollision {
                name: member.name.clone(),
                trusted: trusted.id,
                member: member.id,
            })
        };
        Ok(shared.iter().filter_map(collision).collect())
    }

    /// Returns the members of the realm.
    pub fn members(&self) -> Arc<Vec<TrustedHost>> {
        let members = self.0.members.read();
        members.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns all hosts that are trusted by hand, by name.
    pub fn list(&self) -> Result<Vec<TrustedHost>, TrustError> {
        Ok(self.hosts()?.values().cloned().collect())
    }

    /// Returns the host of that name. A host that is trusted by hand comes before a member.
    pub fn by_name(&self, name: &str) -> Result<Option<TrustedHost>, TrustError> {
        if let Some(host) = self.hosts()?.get(name) {
            return self.by_id(host.id);
        }
        let members = self.members();
        let id = members.iter().find(|member| member.name == name);
        id.map_or(Ok(None), |member| self.by_id(member.id))
    }

    /// Returns the host of that identity. A host in both lists has the name and the addresses from
    /// the file, and the permissions of both.
    pub fn by_id(&self, id: HostId) -> Result<Option<TrustedHost>, TrustError> {
        let hosts = self.hosts()?;
        let members = self.members();
        let member = members.iter().find(|member| member.id == id);
        let Some(trusted) = hosts.values().find(|host| host.id == id) else {
            return Ok(member.cloned());
        };
        let mut host = trusted.clone();
        if let Some(member) = member {
            host.scope = host.scope.or(member.scope);
        }
        Ok(Some(host))
    }

    /// Adds a host, or changes its addresses and scope; the identity must not change.
    pub fn add(&self, host: TrustedHost) -> Result<(), TrustError> {
        self.change(|hosts| {
            if let Some(old) = hosts.get(&host.name)
                && old.id != host.id
            {
                return Err(TrustError::IdentityChanged {
                    name: host.name,
                    was: old.id,
                    now: host.id,
                });
            }
            insert(hosts, host)
        })
    }

    /// Adds a host, replacing any identity that the name had before.
    pub fn replace(&self, host: TrustedHost) -> Result<(), TrustError> {
        self.change(|hosts| insert(hosts, host))
    }

    /// Removes a host and returns it.
    pub fn forget(&self, name: &str) -> Result<TrustedHost, TrustError> {
        let mut forgotten = None;
        self.change(|hosts| {
            forgotten = hosts.remove(name);
            Ok(())
        })?;
        forgotten.ok_or_else(|| TrustError::NoSuchHost(name.to_owned()))
    }

    fn hosts(&self) -> Result<Arc<Hosts>, TrustError> {
        let mut cached = self.0.cached.lock().unwrap_or_else(PoisonError::into_inner);
        self.read(&mut cached)
    }

    fn read(&self, cached: &mut Option<(Stamp, Arc<Hosts>)>) -> Result<Arc<Hosts>, TrustError> {
        let stamp = stamp(&self.0.path).map_err(|error| self.file_error(error))?;
        if let Some((known, hosts)) = cached
            && *known == stamp
        {
            return Ok(hosts.clone());
        }
        *cached = None;
        let hosts = match stamp {
            None => Hosts::new(),
            Some((_, bytes, ..)) if bytes > FILE_BYTES_MAX => {
                return Err(self.malformed("the file is too large".to_owned()));
            }
            Some(_) => {
                let text = std::fs::read_to_string(&self.0.path);
                let text = text.map_err(|error| self.file_error(error))?;
                parse(&text).map_err(|error| self.malformed(error))?
            }
        };
        let hosts = Arc::new(hosts);
        *cached = Some((stamp, hosts.clone()));
        Ok(hosts)
    }

    fn change(
        &self,
        change: impl FnOnce(&mut Hosts) -> Result<(), TrustError>,
    ) -> Result<(), TrustError> {
        let mut cached = self.0.cached.lock().unwrap_or_else(PoisonError::into_inner);
        let mut hosts = Hosts::clone(&*self.read(&mut cached)?);
        change(&mut hosts)?;
        let text = write(&hosts).map_err(TrustError::BadEntry)?;
        *cached = None;
        write_atomic(&self.0.path, text.as_bytes()).map_err(|error| self.file_error(error))
    }

    fn file_error(&self, error: io::Error) -> TrustError {
        TrustError::File {
            path: self.0.path.clone(),
            error: Arc::new(error),
        }
    }

    fn malformed(&self, error: String) -> TrustError {
        TrustError::Malformed {
            path: self.0.path.clone(),
            error,
        }
    }
}

fn stamp(path: &Path) -> io::Result<Stamp> {
    match std::fs::metadata(path) {
        Ok(m) => Ok(Some((m.ino(), m.len(), m.mtime(), m.mtime_nsec()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn insert(hosts: &mut Hosts, host: TrustedHost) -> Result<(), TrustError> {
    check(&host).map_err(TrustError::BadEntry)?;
    if let Some(other) = hosts
        .values()
        .find(|other| other.id == host.id && other.name != host.name)
    {
        return Err(TrustError::OtherName {
            name: other.name.clone(),
            id: other.id,
        });
    }
    if hosts.len() >= TRUSTED_HOSTS_MAX && !hosts.contains_key(&host.name) {
        let text = format!("{TRUSTED_HOSTS_MAX} hosts are trusted already; forget some first");
        return Err(TrustError::BadEntry(text));
    }
    hosts.insert(host.name.clone(), host);
    Ok(())
}

fn check(host: &TrustedHost) -> Result<(), String> {
    let good = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
    let name = &host.name;
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(good) {
        return Err(format!(
            "`{}` is not a host's name: letters, digits, `.`, `-`, `_`, at most {NAME_BYTES_MAX}",
            name.chars().take(80).collect::<String>().escape_debug()
        ));
    }
    if host.addresses.len() > ADDRESSES_MAX {
        return Err(format!(
            "host `{name}` has more than {ADDRESSES_MAX} addresses"
        ));
    }
    for address in &host.addresses {
        let port = address.rsplit_once(':').and_then(|(node, port)| {
            let port: u16 = port.parse().ok()?;
            (!node.is_empty() && node.len() <= NAME_BYTES_MAX && port != 0).then_some(port)
        });
        if port.is_none() {
            return Err(format!(
                "host `{name}`: address `{}` is not `host:port`",
                address.chars().take(80).collect::<String>().escape_debug()
            ));
        }
    }
    Ok(())
}

fn parse(text: &str) -> Result<Hosts, String> {
    let content: FileContent = toml::from_str(text).map_err(|error| error.to_string())?;
    if content.host.len() > TRUSTED_HOSTS_MAX {
        return Err(format!("more than {TRUSTED_HOSTS_MAX} hosts"));
    }
    let mut hosts = Hosts::new();
    for (name, entry) in content.host {
        let id = entry.fingerprint.parse();
        let host = TrustedHost {
            id: id.map_err(|error| format!("host `{name}`: {error}"))?,
            name,
            addresses: entry.addresses,
            scope: Scope {
                may_query: entry.may_query,
                may_send_guests: entry.may_send_guests,
            },
        };
        insert(&mut hosts, host).map_err(|error| error.to_string())?;
    }
    Ok(hosts)
}

fn write(hosts: &Hosts) -> Result<String, String> {
    let host = hosts.values().map(|host| {
        let entry = FileEntry {
            fingerprint: host.id.to_string(),
            addresses: host.addresses.clone(),
            may_query: host.scope.may_query,
            may_send_guests: host.scope.may_send_guests,
        };
        (host.name.clone(), entry)
    });
    let content = FileContent {
        host: host.collect(),
    };
    let text = toml::to_string(&content).map_err(|error| error.to_string())?;
    Ok(format!("{HEADER}{text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str, id: u8) -> TrustedHost {
        TrustedHost {
            name: name.to_owned(),
            id: HostId([id; 32]),
            addresses: vec!["10.0.0.2:4433".to_owned(), "[fd00::2]:4433".to_owned()],
            scope: Scope {
                may_query: true,
                may_send_guests: false,
            },
        }
    }

    fn store() -> (tempfile::TempDir, TrustStore) {
        let folder = tempfile::tempdir().unwrap();
        let store = TrustStore::open(&folder.path().join(TRUST_FILE)).unwrap();
        (folder, store)
    }

    #[test]
    fn hosts_are_added_listed_and_forgotten_across_restarts() {
        let (folder, store) = store();
        assert_eq!(store.list().unwrap(), []);
        store.add(host("beta", 2)).unwrap();
        store.add(host("alpha", 1)).unwrap();
        let again = TrustStore::open(&folder.path().join(TRUST_FILE)).unwrap();
        assert_eq!(again.list().unwrap(), [host("alpha", 1), host("beta", 2)]);
        assert_eq!(again.by_id(HostId([2; 32])).unwrap(), Some(host("beta", 2)));
        assert_eq!(again.forget("beta").unwrap(), host("beta", 2));
        assert_eq!(store.by_name("beta").unwrap(), None);
        let error = store.forget("beta").unwrap_err();
        assert!(matches!(error, TrustError::NoSuchHost(_)), "{error}");
    }

    #[test]
    fn an_identity_changes_only_when_told_to() {
        let (_folder, store) = store();
        store.add(host("alpha", 1)).unwrap();
        let error = store.add(host("alpha", 2)).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, TrustError::IdentityChanged { .. }));
        assert!(text.contains("0101-0101") && text.contains("0202-0202"));
        assert_eq!(store.by_name("alpha").unwrap().unwrap().id, HostId([1; 32]));
        store.replace(host("alpha", 2)).unwrap();
        assert_eq!(store.by_name("alpha").unwrap().unwrap().id, HostId([2; 32]));
    }

    #[test]
    fn one_identity_has_one_name() {
        let (_folder, store) = store();
        store.add(host("alpha", 1)).unwrap();
        let error = store.replace(host("beta", 1)).unwrap_err();
        assert!(matches!(error, TrustError::OtherName { .. }), "{error}");
    }

    #[test]
    fn an_edit_by_hand_is_seen_and_a_broken_one_trusts_nobody() {
        let (folder, store) = store();
        let path = folder.path().join(TRUST_FILE);
        store.add(host("alpha", 1)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("alpha", "gamma")).unwrap();
        assert!(store.by_name("gamma").unwrap().is_some());
        std::fs::write(&path, "[host.alpha]\nfingerprint = 7\n").unwrap();
        let error = store.by_name("gamma").unwrap_err();
        assert!(matches!(error, TrustError::Malformed { .. }), "{error}");
        let error = store.add(host("beta", 2)).unwrap_err();
        assert!(matches!(error, TrustError::Malformed { .. }), "{error}");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(store.list().unwrap(), []);
    }

    #[test]
    fn members_come_beside_the_hosts_trusted_by_hand() {
        let (_folder, store) = store();
        store.add(host("alpha", 1)).unwrap();
        let member = |name: &str, id| TrustedHost {
            addresses: Vec::new(),
            scope: Scope {
                may_query: false,
                may_send_guests: true,
            },
            ..host(name, id)
        };
        let members = vec![member("paris", 1), member("oslo", 2), member("alpha", 3)];
        let collisions = store.set_members(members).unwrap();
        let [collision] = &collisions[..] else {
            panic!("{collisions:?}");
        };
        assert_eq!(collision.member, HostId([3; 32]));
        assert!(collision.to_string().contains("longhaul host forget alpha"));
        // In both lists: the name and the addresses of the file, the permissions of both.
        let both = store.by_name("paris").unwrap().unwrap();
        assert_eq!((&both.name[..], both.addresses.len()), ("alpha", 2));
        assert!(both.scope.may_query && both.scope.may_send_guests);
        assert_eq!(store.by_name("alpha").unwrap().unwrap().id, HostId([1; 32]));
        assert_eq!(store.by_name("oslo").unwrap(), Some(member("oslo", 2)));
        assert_eq!(
            store.by_id(HostId([3; 32])).unwrap(),
            Some(member("alpha", 3))
        );
        assert_eq!(store.list().unwrap().len(), 1);
        store.set_members(Vec::new()).unwrap();
        assert_eq!(store.by_name("oslo").unwrap(), None);
        assert!(
            !store
                .by_name("alpha")
                .unwrap()
                .unwrap()
                .scope
                .may_send_guests
        );
    }

    #[test]
    fn bad_entries_are_refused() {
        let (_folder, store) = store();
        let mut many = host("many", 3);
        many.addresses = vec!["h:1".to_owned(); ADDRESSES_MAX + 1];
        assert!(store.add(many).is_err());
        for name in ["", "a b", "a/b", "\u{1b}[2J", &"x".repeat(256)] {
            assert!(store.add(host(name, 1)).is_err(), "{name:?}");
        }
        for address in ["", "host", "host:", "host:0", ":1", "host:65536"] {
            let mut bad = host("alpha", 1);
            bad.addresses = vec![address.to_owned()];
            assert!(store.add(bad).is_err(), "{address:?}");
        }
    }
}
