//! Builds the Internet of a laboratory: a public network, sites with hosts behind routers of every
//! kind, servers with public addresses, and a client's site.
//!
//! ```text
//! host, host .. site's router - (carrier's router) == Internet == router .. server
//!               192.168.1.1     203.0.113.1           203.0.113.254
//! ```
//!
//! `==` is an uplink, an emulated link with the site's rate, round trip and loss. All private sites
//! have the same addresses, as homes and offices do: a private address of another site leads
//! astray. Addresses are those reserved for documentation (RFC 5737, RFC 3849), private ones
//! (RFC 1918), and a carrier's (RFC 6598).

pub mod access;
mod build;
pub mod probe;
mod router;
mod rules;

use self::access::Access;
pub use self::router::{PortMapper, Router};
use crate::error::LabError;
use crate::lab::Host;
use crate::link::measure::{self, Measured};
use crate::link::spec::LinkSpec;
use crate::link::{Control, Link};
use crate::netns::Namespace;

/// The maximum number of servers.
pub const SERVERS_MAX: usize = 4;

/// The parameters of an Internet.
#[derive(Debug, Clone)]
pub struct SitesPlan {
    /// Its purpose, as `lab ls` shows it.
    pub purpose: String,
    /// The sites with the hosts, each with its uplink; at most as many as
    /// [`HOST_NAMES`](crate::lab::HOST_NAMES).
    pub sites: Vec<SitePlan>,
    /// The number of servers, at most [`SERVERS_MAX`].
    pub servers: usize,
    /// The uplink of each server, and of the client's site.
    pub backbone: LinkSpec,
    /// The seed of the random losses of links.
    pub seed: u64,
}

/// The parameters of a site.
#[derive(Debug, Clone)]
pub struct SitePlan {
    /// Its hosts and what is between them and the Internet.
    pub access: Access,
    /// Its uplink: two sites are both their uplinks apart.
    pub uplink: LinkSpec,
}

/// The Internet of a laboratory, with everything but the hosts of its sites.
#[derive(Debug)]
pub struct Internet {
    namespace: Namespace,
    sites: Vec<Site>,
    servers: Vec<Host>,
    client: Host,
    /// The sites of servers and client.
    public: Vec<Site>,
}

/// A site: routers and an uplink.
#[derive(Debug)]
pub struct Site {
    name: String,
    /// Counted from 1 over all sites; its addresses are derived from it.
    number: u8,
    access: Access,
    asked: LinkSpec,
    address: Option<String>,
    /// From the hosts outwards.
    routers: Vec<Router>,
    uplink: Link,
}

impl Internet {
    /// Returns the namespace of the public network.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Returns the sites with the hosts, in the order of the plan.
    pub fn sites(&self) -> &[Site] {
        &self.sites
    }

    /// Returns a site.
    ///
    /// # Errors
    /// When there is none of that number.
    pub fn site(&self, index: usize) -> Result<&Site, LabError> {
        self.sites
            .get(index)
            .ok_or_else(|| no(&format!("site {index}")))
    }

    /// Returns the site of a host of the laboratory.
    ///
    /// # Errors
    /// When there is none of that number.
    pub fn site_of(&self, host: usize) -> Result<&Site, LabError> {
        let mut hosts = 0;
        let mut sites = self.sites.iter();
        let found = sites.find(|site| {
            hosts += site.access.hosts;
            host < hosts
        });
        found.ok_or_else(|| no(&format!("site of host {host}")))
    }

    /// Returns the servers.
    pub fn servers(&self) -> &[Host] {
        &self.servers
    }

    /// Returns a server.
    ///
    /// # Errors
    /// When there is none of that number.
    pub fn server(&self, index: usize) -> Result<&Host, LabError> {
        self.servers
            .get(index)
            .ok_or_else(|| no(&format!("server {index}")))
    }

    /// Returns the host of the client's site, which is on the Internet.
    pub fn client(&self) -> &Host {
        &self.client
    }

    /// Returns the uplinks of servers, in order, and then the client's.
    pub fn backbone(&self) -> impl Iterator<Item = &Control> {
        self.public.iter().map(Site::uplink)
    }

    /// Measures the uplink of a site, which nothing else may use meanwhile, and compares it with
    /// the request. Tries again once: a busy machine may have been late.
    ///
    /// # Errors
    /// When it cannot be measured, or differs by more than the laboratory's tolerances.
    pub fn measure_uplink(&self, site: &Site) -> Result<Measured, LabError> {
        let outermost = site.routers.last().ok_or_else(|| no("router"))?;
        let ends = build::uplink_ends(site.number);
        let ends = [
            ends[0].end(&site.name, outermost.namespace()),
            ends[1].end(build::INTERNET, &self.namespace),
        ];
        measure::measure_as_asked(ends, site.asked)
    }
}

impl Site {
    /// Returns its name: one of [`HOST_NAMES`](crate::lab::HOST_NAMES), or that of its server or
    /// client.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns what is between its hosts and the Internet.
    pub fn access(&self) -> &Access {
        &self.access
    }

    /// Returns its public IPv4 address, which its hosts share; `None` if each host has its own, or
    /// there is no IPv4.
    pub fn address(&self) -> Option<&str> {
        self.address.as_deref()
    }

    /// Returns its routers: its own, then its carrier's.
    pub fn routers(&self) -> &[Router] {
        &self.routers
    }

    /// Returns the router that its hosts are connected to.
    ///
    /// # Errors
    /// Never for a complete laboratory.
    pub fn router(&self) -> Result<&Router, LabError> {
        self.routers.first().ok_or_else(|| no("router"))
    }

    /// Returns the controls of its uplink. The first direction is from the site to the Internet.
    pub fn uplink(&self) -> &Control {
        self.uplink.control()
    }
}

fn no(what: &str) -> LabError {
    LabError::Which(format!("this laboratory has no {what}"))
}
