//! Manages a laboratory: hosts, each a network namespace with a folder and an address, and a link
//! between every two of them, or an Internet that joins their sites. It is removed when dropped;
//! the remains of a crash are removed by the next one.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use crate::error::{During, LabError};
use crate::guest::network;
use crate::internet::{Internet, SitesPlan};
use crate::link::measure::{self, Measured};
use crate::link::spec::LinkSpec;
use crate::link::{self, Control, End, Link};
use crate::netns::Namespace;
use crate::registry::{Claim, HostRecord, LAB_VARIABLE, LinkRecord, Record, Registry};

/// The names of the hosts of a laboratory, in this order.
pub const HOST_NAMES: [&str; 6] = ["lyon", "paris", "oslo", "porto", "turin", "delhi"];

/// The parameters of a laboratory.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Its purpose, as `lab ls` shows it.
    pub purpose: String,
    /// The number of hosts, from 1 to [`HOST_NAMES`]'s length.
    pub hosts: usize,
    /// The link between every two of them.
    pub link: LinkSpec,
    /// The seed of the random losses of a link.
    pub seed: u64,
}

/// A running laboratory.
#[derive(Debug)]
pub struct Lab {
    claim: Claim,
    hosts: Vec<Host>,
    links: Vec<(usize, usize, Link)>,
    second_links: Vec<(usize, usize, Link)>,
    clients: Option<Namespace>,
    internet: Option<Internet>,
}

/// An emulated host.
#[derive(Debug)]
pub struct Host {
    lab: String,
    name: String,
    number: u8,
    /// The first is the one that others use; at least one.
    addresses: Vec<String>,
    /// The address on second links.
    second_address: Option<String>,
    folder: PathBuf,
    sockets: PathBuf,
    namespace: Namespace,
}

impl Lab {
    /// Removes the remains of earlier laboratories, then creates this one.
    ///
    /// # Errors
    /// When some part of it cannot be created; the created parts are removed again.
    pub fn create(plan: &Plan) -> Result<Self, LabError> {
        let limit = HOST_NAMES.len();
        if !(1..=limit).contains(&plan.hosts) {
            return Err(LabError::Which(format!(
                "a laboratory has between 1 and {limit} hosts, not {}",
                plan.hosts
            )));
        }
        let mut lab = Self::empty(&plan.purpose)?;
        for (index, name) in HOST_NAMES.iter().take(plan.hosts).enumerate() {
            let number = index as u8 + 1;
            let addresses = vec![format!("10.77.0.{number}")];
            let host = Host::create(&mut lab.claim, name, number, addresses, "")?;
            lab.hosts.push(host);
        }
        for first in 0..plan.hosts {
            for second in first + 1..plan.hosts {
                lab.add_link(first, second, plan)?;
            }
        }
        lab.claim.save()?;
        Ok(lab)
    }

    /// Removes the remains of earlier laboratories, then creates one whose hosts are at sites of an
    /// Internet, without links between them.
    ///
    /// # Errors
    /// When some part of it cannot be created; the created parts are removed again.
    pub fn create_sites(plan: &SitesPlan) -> Result<Self, LabError> {
        let mut lab = Self::empty(&plan.purpose)?;
        let (internet, hosts) = Internet::create(&mut lab.claim, plan)?;
        lab.internet = Some(internet);
        lab.hosts = hosts;
        lab.claim.save()?;
        Ok(lab)
    }

    fn empty(purpose: &str) -> Result<Self, LabError> {
        let registry = Registry::of_this_machine();
        for id in registry.sweep()? {
            say(&format!("removed what laboratory {id} had left"));
        }
        Ok(Self {
            claim: registry.enter(purpose)?,
            hosts: Vec::new(),
            links: Vec::new(),
            second_links: Vec::new(),
            clients: None,
            internet: None,
        })
    }

    /// Returns its name.
    pub fn id(&self) -> &str {
        &self.claim.record.id
    }

    /// Returns its entry in the registry.
    pub fn record(&self) -> &Record {
        &self.claim.record
    }

    /// Returns its hosts, in the order of [`HOST_NAMES`], or of the sites.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Returns a host; guests start on the first.
    ///
    /// # Errors
    /// Never for a complete laboratory.
    pub fn host(&self, index: usize) -> Result<&Host, LabError> {
        self.hosts
            .get(index)
            .ok_or_else(|| LabError::Which(format!("this laboratory has no host {index}")))
    }

    /// Returns a folder on storage shared by all hosts (they are on one machine).
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn shared_folder(&self) -> Result<PathBuf, LabError> {
        make_folder(&self.claim.record.data.join("shared"))
    }

    /// Returns the controls of the link between two hosts; at sites, of the uplink of the first
    /// one's site, which more than these two may use. The first direction is from the first host
    /// to the second.
    ///
    /// # Errors
    /// When there is none between these.
    pub fn link(&self, first: usize, second: usize) -> Result<&Control, LabError> {
        let pair = (first.min(second), first.max(second));
        if let Some(internet) = &self.internet {
            return Ok(internet.site_of(pair.0)?.uplink());
        }
        self.links
            .iter()
            .find(|(from, to, _)| (*from, *to) == pair)
            .map(|(.., link)| link.control())
            .ok_or_else(|| LabError::Which(format!("no link between hosts {first} and {second}")))
    }

    /// Returns the Internet that joins the sites of its hosts.
    ///
    /// # Errors
    /// When its hosts are joined by links.
    pub fn internet(&self) -> Result<&Internet, LabError> {
        let none = || LabError::Which("this laboratory has links, and no Internet".to_owned());
        self.internet.as_ref().ok_or_else(none)
    }

    /// Creates a network of guests and their clients, beside the links.
    ///
    /// # Errors
    /// When a part of it cannot be made.
    pub fn add_clients(&mut self) -> Result<(), LabError> {
        let name = format!("lh-{}-clients", self.id());
        self.claim.record.clients = Some(name.clone());
        self.claim.save()?;
        let clients = Namespace::create(&name)?;
        network::create(&self.hosts, &clients)?;
        self.clients = Some(clients);
        Ok(())
    }

    /// Creates clients of guests, whose only interface is a port of a bridge on a host.
    ///
    /// # Errors
    /// When a part of it cannot be made.
    pub fn add_clients_at(&mut self, host: usize, bridge: &str) -> Result<(), LabError> {
        let name = format!("lh-{}-clients", self.id());
        self.claim.record.clients = Some(name.clone());
        self.claim.save()?;
        let clients = Namespace::create(&name)?;
        network::join(self.host(host)?, bridge, &clients)?;
        self.clients = Some(clients);
        Ok(())
    }

    /// Returns the namespace of the guests' clients.
    ///
    /// # Errors
    /// When this laboratory has none.
    pub fn clients(&self) -> Result<&Namespace, LabError> {
        let none = || LabError::Which("this laboratory has no clients".to_owned());
        self.clients.as_ref().ok_or_else(none)
    }

    /// Measures the link between the first two hosts, which nothing else may use meanwhile, and
    /// compares it with the request. Tries again once: a busy machine may have been late.
    ///
    /// # Errors
    /// When it cannot be measured, or differs by more than the laboratory's tolerances.
    pub fn measure_link(&self, asked: LinkSpec) -> Result<Measured, LabError> {
        let ends = [self.host(0)?.end(), self.host(1)?.end()];
        measure::measure_as_asked(ends, asked)
    }

    /// As [`Self::measure_link`], for the second link between the first two hosts.
    ///
    /// # Errors
    /// When it cannot be measured, or differs by more than the laboratory's tolerances.
    pub fn measure_second_link(&self, asked: LinkSpec) -> Result<Measured, LabError> {
        let ends = [self.host(0)?.second_end(), self.host(1)?.second_end()];
        measure::measure_as_asked(ends, asked)
    }

    /// Records the socket of a host's agent, for `lab`'s users.
    ///
    /// # Errors
    /// When the record cannot be written.
    pub fn note_agent(&mut self, host: &str, api: &Path) -> Result<(), LabError> {
        self.note(host, |record| record.api = Some(api.to_owned()))
    }

    /// Records what the hosts reach, for `lab`'s users.
    ///
    /// # Errors
    /// When the record cannot be written.
    pub fn note_reach(&mut self, lines: Vec<String>) -> Result<(), LabError> {
        self.claim.record.reach = lines;
        self.claim.save()
    }

    /// Records the guest that was started on a host, for `lab`'s users.
    ///
    /// # Errors
    /// When the record cannot be written.
    pub fn note_guest(&mut self, host: &str, guest: &str) -> Result<(), LabError> {
        self.note(host, |record| record.guest = Some(guest.to_owned()))
    }

    fn note(&mut self, host: &str, change: impl Fn(&mut HostRecord)) -> Result<(), LabError> {
        let hosts = &mut self.claim.record.hosts;
        hosts
            .iter_mut()
            .filter(|record| record.name == host)
            .for_each(change);
        self.claim.save()
    }

    /// Adds a second link between two hosts, with addresses of its own at its ends.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn add_second_link(
        &mut self,
        (first, second): (usize, usize),
        spec: LinkSpec,
        seed: u64,
    ) -> Result<(), LabError> {
        for index in [first, second] {
            let host = self.hosts.get_mut(index);
            let none = || LabError::Which(format!("this laboratory has no host {index}"));
            let host = host.ok_or_else(none)?;
            host.second_address = Some(format!("10.78.0.{}", host.number));
        }
        let ends = [
            self.host(first)?.second_end(),
            self.host(second)?.second_end(),
        ];
        let between = ends.map(|end| end.name.to_owned());
        let link = Link::create(ends, spec, seed, &self.claim)?;
        self.claim.record.links.push(LinkRecord {
            between,
            asked: spec.to_string(),
            control: link.control().socket().to_owned(),
        });
        self.second_links.push((first, second, link));
        self.claim.save()
    }

    /// Returns the controls of the second link between two hosts.
    ///
    /// # Errors
    /// When there is none between these.
    pub fn second_link(&self, first: usize, second: usize) -> Result<&Control, LabError> {
        let pair = (first.min(second), first.max(second));
        self.second_links
            .iter()
            .find(|(from, to, _)| (*from, *to) == pair)
            .map(|(.., link)| link.control())
            .ok_or_else(|| LabError::Which(format!("no link 2 between hosts {first} and {second}")))
    }

    fn add_link(&mut self, first: usize, second: usize, plan: &Plan) -> Result<(), LabError> {
        let ends = [self.host(first)?.end(), self.host(second)?.end()];
        let between = ends.map(|end| end.name.to_owned());
        let link = Link::create(ends, plan.link, plan.seed, &self.claim)?;
        self.claim.record.links.push(LinkRecord {
            between,
            asked: plan.link.to_string(),
            control: link.control().socket().to_owned(),
        });
        self.links.push((first, second, link));
        Ok(())
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.links.clear();
        self.second_links.clear();
        self.internet = None;
        if let Err(error) = self.claim.remove() {
            say(&format!(
                "laboratory {} was not removed: {error} (hint: lab down)",
                self.id()
            ));
        }
    }
}

impl Host {
    /// Creates a host, recorded before. `place` is how it is attached to the Internet, if there is
    /// one.
    pub(crate) fn create(
        claim: &mut Claim,
        name: &str,
        number: u8,
        addresses: Vec<String>,
        place: &str,
    ) -> Result<Self, LabError> {
        let id = claim.record.id.clone();
        let namespace = format!("lh-{id}-{name}");
        claim.record.hosts.push(HostRecord {
            name: name.to_owned(),
            namespace: namespace.clone(),
            address: addresses.first().cloned().unwrap_or_default(),
            place: (!place.is_empty()).then(|| place.to_owned()),
            api: None,
            guest: None,
        });
        claim.save()?;
        Ok(Self {
            name: name.to_owned(),
            number,
            addresses,
            second_address: None,
            folder: make_folder(&claim.record.data.join(name))?,
            sockets: claim.folder().to_owned(),
            namespace: Namespace::create(&namespace)?,
            lab: id,
        })
    }

    /// Adds addresses that were given to its interface.
    pub(crate) fn add_addresses(&mut self, more: Vec<String>) {
        self.addresses.extend(more);
    }

    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its address on every link, or at its site.
    pub fn address(&self) -> &str {
        self.addresses.first().map_or("", String::as_str)
    }

    /// Returns all its addresses.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Returns the folder that holds its state; removed with the laboratory.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the folder for sockets, which has a short path; shared by the laboratory's hosts.
    pub fn socket_folder(&self) -> &Path {
        &self.sockets
    }

    /// Returns its network namespace.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Returns this host's end of a link.
    pub fn end(&self) -> End<'_> {
        End {
            name: &self.name,
            link: 1,
            number: self.number,
            address: self.address(),
            namespace: &self.namespace,
        }
    }

    /// Returns its address on second links, if it has one.
    pub fn second_address(&self) -> Option<&str> {
        self.second_address.as_deref()
    }

    fn second_end(&self) -> End<'_> {
        End {
            link: 2,
            address: self.second_address().unwrap_or_default(),
            ..self.end()
        }
    }

    /// Starts a process on this host that belongs to the laboratory: it ends with it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(&self, command: &mut Command) -> Result<Child, LabError> {
        self.namespace.spawn(command.env(LAB_VARIABLE, &self.lab))
    }

    /// Runs a process on this host to its end and returns its standard output.
    ///
    /// # Errors
    /// When it cannot be started or fails.
    pub fn output(&self, command: &mut Command) -> Result<String, LabError> {
        self.namespace.output(command.env(LAB_VARIABLE, &self.lab))
    }
}

/// Prints a message on the standard error: the standard output is for documents.
pub fn say(text: &str) {
    let mut stderr = std::io::stderr().lock();
    // The reader is gone.
    let _ = writeln!(stderr, "{text}");
}

/// Prints the result of a command on the standard output.
///
/// # Errors
/// When it cannot be written.
pub fn print(text: &str) -> Result<(), LabError> {
    let mut stdout = std::io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .during(|| "print".to_owned())
}

fn make_folder(path: &Path) -> Result<PathBuf, LabError> {
    std::fs::create_dir_all(path).during(|| format!("make {}", path.display()))?;
    Ok(path.to_owned())
}

/// Returns the name of the interface on one host towards another.
pub fn interface_to(peer: &Host) -> String {
    link::interface(&peer.name)
}
