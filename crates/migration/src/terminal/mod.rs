//! Terminals: hosts to which the devices of parcels are attached.
//!
//! [`give`] is the terminal's end of a channel, and [`take`] the end of the host whose command
//! writes or reads the device. The messages are those of [`longhaul_protocol::terminal`].

mod give;
mod take;

pub(crate) use give::give;
pub use take::DeviceChannel;
pub(crate) use take::{Terminals, take};
