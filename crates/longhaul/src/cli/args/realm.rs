//! The arguments of realms, networks and rendezvous servers.

use super::May;
use clap::{Args, Subcommand};
use longhaul_protocol::HostId;
use longhaul_protocol::units::{parse_bit_rate, parse_duration};
use longhaul_realm::key::RealmId;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// The folder of an operator.
#[derive(Debug, Clone, Args)]
pub(crate) struct FolderArgs {
    /// The operator's folder [env: LONGHAUL_REALM] [default: ~/.config/longhaul/realm]
    #[arg(long, global = true, value_name = "FOLDER")]
    pub(crate) folder: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct RealmArgs {
    #[command(flatten)]
    pub(crate) folder: FolderArgs,
    #[command(subcommand)]
    pub(crate) command: RealmCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RealmCommand {
    /// Make a realm: its key and its documents, in a folder of the operator
    Create {
        /// The name of the realm, for people
        name: String,
    },
    /// Show the realm of the folder, and what is not signed yet
    Show,
    /// Add a rendezvous server, or change its addresses
    AddServer {
        /// Its fingerprint, as `longhaul rendezvous` shows it
        fingerprint: HostId,
        /// Where it listens: HOST:PORT for UDP, tcp/HOST:PORT for TCP, stun/HOST:PORT for STUN
        #[arg(required = true, value_name = "ADDRESS")]
        addresses: Vec<String>,
    },
    /// Remove a rendezvous server
    RemoveServer {
        /// Its fingerprint
        fingerprint: HostId,
    },
    /// Sign a new version of the ruleset
    Sign,
    /// List hosts that joined, sign what has changed, and give it to the rendezvous servers
    Publish,
}

#[derive(Debug, Args)]
pub(crate) struct NetworkArgs {
    #[command(flatten)]
    pub(crate) folder: FolderArgs,
    #[command(subcommand)]
    pub(crate) command: Option<NetworkCommand>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum NetworkCommand {
    /// List the networks of the realm
    List,
    /// Make a network
    Create {
        /// Its name
        name: String,
        /// The largest payload of a frame, in bytes
        #[arg(long, default_value_t = 1500, value_name = "BYTES")]
        mtu: u16,
        /// Which VLAN tags its frames may carry: `none`, `any`, or ranges such as 10-19,30
        #[arg(long, default_value = "none", value_name = "VLANS")]
        vlans: String,
    },
    /// Let hosts have ports in a network
    Add {
        /// The network
        network: String,
        /// The hosts, by name
        #[arg(required = true, value_name = "HOST")]
        hosts: Vec<String>,
    },
    /// Give a network a way out, which has the same addresses at each of its hosts
    Gateway {
        /// The network
        network: String,
        /// An address of the gateway, and the bits of its subnet's prefix: 10.0.0.1/24; can be
        /// repeated
        #[arg(
            long = "address",
            value_name = "ADDRESS/BITS",
            required_unless_present = "none"
        )]
        addresses: Vec<String>,
        /// A site whose hosts have the gateway; can be repeated. Without, all members have it
        #[arg(long = "site", value_name = "SITE")]
        sites: Vec<String>,
        /// Let the network have no gateway
        #[arg(long, conflicts_with_all = ["addresses", "sites"])]
        none: bool,
    },
    /// Remove hosts from a network; without hosts, the network
    Remove {
        /// The network
        network: String,
        /// The hosts, by name
        #[arg(value_name = "HOST")]
        hosts: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct InviteArgs {
    #[command(flatten)]
    pub(crate) folder: FolderArgs,
    /// The name that the host gets in the realm
    pub(crate) name: String,
    /// Its site
    #[arg(long, default_value = "default", value_name = "SITE")]
    pub(crate) site: String,
    /// A network that it may have ports in; can be repeated
    #[arg(long = "network", value_name = "NETWORK")]
    pub(crate) networks: Vec<String>,
    /// What it may ask of other members
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "WHAT",
        default_value = "query,send"
    )]
    pub(crate) may: Vec<May>,
    /// How long the token can be used, at most 30 days
    #[arg(long, default_value = "24h", value_parser = parse_duration, value_name = "TIME")]
    pub(crate) expires: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct RemoveHostArgs {
    #[command(flatten)]
    pub(crate) folder: FolderArgs,
    /// Its name in the realm
    pub(crate) name: String,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct RendezvousArgs {
    #[command(flatten)]
    pub(crate) serve: ServeArgs,
    #[command(subcommand)]
    pub(crate) command: Option<RendezvousCommand>,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// The UDP address for hosts and other servers
    #[arg(long, default_value = "[::]:7401", value_name = "ADDRESS")]
    pub(crate) listen: SocketAddr,
    /// A TCP address for hosts whose UDP is blocked, such as [::]:443
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen_tcp: Option<SocketAddr>,
    /// Another UDP address, for STUN alone, such as [::]:7402: hosts need two to know their NAT
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen_stun: Option<SocketAddr>,
    /// The folder of its identity and store
    #[arg(
        long,
        default_value = "/var/lib/longhaul-rendezvous",
        value_name = "FOLDER"
    )]
    pub(crate) state: PathBuf,
    /// A realm that it serves, by id; can be repeated
    #[arg(long = "realm", value_name = "ID")]
    pub(crate) realms: Vec<RealmId>,
    /// Most hosts that are connected at once
    #[arg(long, default_value_t = 8192, value_name = "COUNT")]
    pub(crate) hosts: usize,
    /// Most relay sessions at once; 0 to relay nothing
    #[arg(long, default_value_t = 4096, value_name = "COUNT")]
    pub(crate) sessions: usize,
    /// What it relays in total, a second
    #[arg(long, default_value = "4gbit", value_parser = parse_bit_rate, value_name = "RATE")]
    pub(crate) relay_bandwidth: u64,
    /// What it relays for one pair of hosts, a second
    #[arg(long, default_value = "1gbit", value_parser = parse_bit_rate, value_name = "RATE")]
    pub(crate) session_bandwidth: u64,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RendezvousCommand {
    /// Copy the store into a new file, while the server runs
    Backup {
        /// The folder of its identity and store
        #[arg(
            long,
            default_value = "/var/lib/longhaul-rendezvous",
            value_name = "FOLDER"
        )]
        state: PathBuf,
        /// The new file
        file: PathBuf,
    },
}
