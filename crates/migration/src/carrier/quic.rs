//! The bulk connection as a carrier.

use crate::carrier::{CarrierError, CarrierStats, Carrying, FrameSink, FrameSource, Room};
use bytes::Bytes;
use longhaul_transport::{BulkError, BulkPermit, BulkReceiver, BulkSender, PathTraffic};

impl From<BulkError> for CarrierError {
    fn from(error: BulkError) -> Self {
        match error {
            BulkError::TooLarge { bytes, limit } => Self::TooLarge { bytes, limit },
            lost => Self::Lost(Box::new(lost)),
        }
    }
}

impl FrameSink for BulkSender {
    fn reserve(&self) -> Carrying<'_, Result<Box<dyn Room>, CarrierError>> {
        Box::pin(async {
            let room: Box<dyn Room> = Box::new(self.reserve().await?);
            Ok(room)
        })
    }

    fn frames_in_hand(&self) -> usize {
        self.frames_in_hand()
    }

    fn acknowledgement(&self) -> Carrying<'_, Result<Bytes, CarrierError>> {
        Box::pin(async {
            match self.acknowledgement().await? {
                Some(message) => Ok(message),
                // The receiver ends its acknowledgements with the connection.
                None => Err(BulkError::Lost(self.closed().await).into()),
            }
        })
    }

    fn set_bandwidth(&self, limit_bps: Option<u64>) {
        self.set_bandwidth(limit_bps);
    }

    fn stats(&self) -> CarrierStats {
        let stats = self.stats();
        CarrierStats {
            rtt: stats.rtt,
            path_rate_bps: stats.path_rate_bps(),
            window_bytes: stats.congestion_window_bytes,
            delivery_rate_bps: stats.delivery_rate_bps,
            sent_bytes: stats.wire_bytes_sent,
            received_bytes: stats.wire_bytes_received,
        }
    }

    fn traffic(&self) -> Vec<PathTraffic> {
        self.traffic()
    }
}

impl Room for BulkPermit {
    fn send(self: Box<Self>, frame: Bytes, urgent: bool) -> Result<(), CarrierError> {
        let sent = match urgent {
            true => self.send_ahead(frame),
            false => (*self).send(frame),
        };
        Ok(sent?)
    }
}

impl FrameSource for BulkReceiver {
    async fn recv(&self) -> Result<Option<Bytes>, CarrierError> {
        Ok(self.recv().await?)
    }

    async fn acknowledge(&self, message: &[u8]) -> Result<(), CarrierError> {
        Ok(self.acknowledge(message).await?)
    }

    async fn lost(&self) -> CarrierError {
        BulkError::Lost(self.closed().await).into()
    }
}
