//! Implements host identities, trust, and the connections between hosts.
//!
//! A host has an [`Identity`] (a key pair, made at first start) and a [`TrustStore`] (which other
//! hosts it knows, and what each may do here). Its [`Endpoint`] is one UDP socket, from which it
//! dials trusted hosts and on which it is dialled. A [`Control`] connection carries messages in
//! [`Channel`]s. A migration's data go over a second connection of their own: the receiving side
//! makes a [`BulkOffer`], its token travels on the control connection, and the sending side
//! redeems it for a [`BulkSender`]:
//!
//! ```text
//! source                                          destination
//! endpoint.connect("beta") -> Control   ------>   endpoint.accept() -> Control
//! control.open() -> Channel             ------>   control.accept() -> Channel
//!                                       <------   control.offer_bulk(..) -> BulkOffer
//! control.connect_bulk(token, ..)       ======>   offer.accept() -> BulkReceiver
//!   -> BulkSender
//! sender.reserve() -> permit.send(..)   ======>   receiver.recv()
//! sender.acknowledgement()              <======   receiver.acknowledge(..)
//! ```
//!
//! A peer that is reached over changing ways, through NATs and relays, has an address of its own,
//! which [`Routes`] maps to the way that is used now; [`Endpoint::connect_peer`] dials it. The
//! frame plane shares the socket: its datagrams go to a [`Datagrams`], and it sends by a
//! [`PlaneSocket`].

mod bulk;
mod control;
mod endpoint;
mod error;
mod files;
mod framing;
mod gauge;
mod hello;
mod identity;
mod keeper;
mod mux;
mod paths;
mod plane;
mod probe;
mod quic;
mod rate;
mod rendezvous;
mod road;
mod routes;
mod stun;
mod tls;
mod trust;

pub use bulk::{
    ACKNOWLEDGEMENT_BYTES_MAX, BULK_STREAMS_MAX, BulkBinding, BulkConfig, BulkOffer, BulkOpening,
    BulkPermit, BulkPurpose, BulkReceiver, BulkSender, BulkStats, BulkToken, BulkWireError,
    StreamHeader, StreamKind,
};
pub use control::{CHANNELS_MAX, Channel, ChannelReceiver, ChannelSender, Control, Peer};
pub use endpoint::{
    CONNECTIONS_PER_PEER_MAX, Endpoint, EndpointConfig, EndpointError, HANDSHAKES_MAX,
    MESSAGES_BYTES_PER_PEER_MAX,
};
pub use error::{BulkError, ChannelError, CloseCode, ConnectError, LinkError};
pub use files::write_atomic;
pub use gauge::{LinkGauge, LinkRate};
pub use hello::{
    HELLO_BODY_BYTES_MAX, HELLO_MAGIC, Hello, HelloError, Incompatible, SOFTWARE_BYTES_MAX,
};
pub use identity::{Identity, IdentityError, KEY_FILE};
pub use longhaul_paths::SocketId;
pub use mux::{DatagramKind, Datagrams, DroppedDatagrams, Kept, Outlet, SOCKETS_MAX, Source, sort};
pub use paths::{PATHS_MAX, PathTo, PathTraffic};
pub use plane::{PlaneError, PlaneSocket};
pub use probe::{PROBE_TIME_MAX, ProbeConfig, ProbeError, ProbeReport, ProbeSample};
pub use rendezvous::{
    Received, Relay, RelaySender, RendezvousConfig, RendezvousHandle, RendezvousLink,
    RendezvousProtocol, RendezvousReceiver, RendezvousSender, RendezvousServer, TcpFrames,
    TcpFramesError, frame_header,
};
pub use routes::{ARRIVALS_PER_PEER_MAX, RelayLeg, Routes, Way};
pub use stun::{
    BindingAnswer, BindingError, BindingRequest, Observation, Reflexive, ReflexiveError,
    STUN_ANSWER_BYTES_MAX, STUN_BYTES_MAX, StunError, TransactionId, binding_answer, serve_stun,
};
pub use trust::{
    ADDRESSES_MAX, NameCollision, Permission, Scope, TRUST_FILE, TRUSTED_HOSTS_MAX, TrustError,
    TrustStore, TrustedHost,
};
